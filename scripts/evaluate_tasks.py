"""What evaluate.py asks lm-eval for: tasks by name or from files, and their results as files."""

import json
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from lit_gen.durable import partial_path, publish
from lit_gen.utils import UserError


def load_tasks(names: list[str], include_path: Path | None) -> tuple[TaskManager, list[Any]]:
    """lm-eval's task manager, and the tasks and groups of these names and YAML files.

    Raises:
        UserError: there is no such task, or its data cannot be had.
    """
    # To read the thousands of files of lm-eval's own tasks takes many seconds.
    manager = TaskManager(include_path=include_path, include_defaults=not all(map(_is_yaml, names)))
    found: list[Any] = []
    for name in names:
        matches = [name] * Path(name).is_file() if _is_yaml(name) else manager.match_tasks([name])
        if not matches:
            raise UserError(f"there is no task {name!r:.80}: give a name of `lm-eval ls tasks`, or a .yaml file")
        for match in matches:
            try:
                loaded = manager.load([match])
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"task {match} cannot be loaded: {' '.join(str(error).split()):.300}") from None
            inner = {child for children in loaded["group_map"].values() for child in children}
            found += [group for group in loaded["groups"].values() if group.name not in inner]
            found += [] if loaded["groups"] else loaded["tasks"].values()
    if not found:
        raise UserError("--tasks names no task")
    return manager, found


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def output_files(out: Path | None, tasks: list[str], log_samples: bool) -> dict[str, Path]:
    """Where results go, by task, those of all tasks by ""; UserError for what cannot be written or is there."""
    if out is None:
        if log_samples:
            raise UserError("--log_samples true writes files beside --out: give one, such as results.json")
        return {}
    files = {"": out}
    if log_samples:
        files |= {task: out.with_name(f"{out.stem}.{task.replace('/', '_')}.jsonl") for task in tasks}
    for file in files.values():
        if file.exists() or not file.absolute().parent.is_dir():
            raise UserError(f"{file} is there already, or its folder is not: give another --out")
    return files


def write_results(results: dict[str, Any], files: dict[str, Path]) -> None:
    """lm-eval's results as JSON, and what was asked and answered, a line for each question."""
    samples = results.pop("samples", {})
    for task, file in files.items():
        with partial_path(file).open("w", encoding="utf-8") as partial:
            for value in samples[task] if task else [results]:
                how = {"default": handle_non_serializable, "ensure_ascii": False, "indent": None if task else 2}
                partial.write(json.dumps(value, **how) + "\n")
        publish(partial_path(file), file)
