"""Options of the output, and checks of files and folders before any training."""

import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..analysis.folder import find_run_folder
from ..core.errors import ConfigError, RunError
from ..core.io import is_stdout
from ..core.options import option, write_option
from .config import split_words

if TYPE_CHECKING:
    from ..runs.callbacks import Callback


def _parse_processes(value: object) -> object:
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 5 else value
    if number != "auto" and (not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= 1024):
        raise ValueError("expected a number of processes from 1 to 1024, or auto")
    return number


Processes = Annotated[
    int | Literal["auto"],
    BeforeValidator(_parse_processes),
    Field(description="runs to train at the same time; auto: several processes if that saves time"),
]


AllowCode = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda given: tuple(filter(None, split_words(given, "references such as net.py:make,own.py:near")))
    ),
    Field(
        description="run this code although only a file or run folder names it: file.py:function, separated by commas"
    ),
]


class OutputOptions(BaseModel):
    """Places for results, and processes to train in; no part of the identity of an experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    config: Path | None = option("YAML file with these options; the command line wins")
    out: Path | None = option("run folder, absent or empty (default: runs/COMMAND-DATA-TIME)")
    json_file: Path | None = option("also write the result to this file", alias="json")
    resume: Path | None = option("resume the interrupted run in this folder")
    allow_code: AllowCode = ()
    columns: str | None = option(
        "columns of the table: all, or names with commas between (default: what fits 80 characters)"
    )
    quiet: bool = option("show no progress, only the result", False)
    tensorboard: bool = option("also write event files; show them by tensorboard --logdir RUN-FOLDER", False)
    mlflow: bool = option("also log to MLflow, where MLFLOW_TRACKING_URI says", False)
    wandb: bool = option("also log to Weights & Biases", False)
    processes: Processes = "auto"

    def make_callbacks(self) -> "tuple[Callback, ...]":
        if not (self.tensorboard or self.mlflow or self.wandb):
            return ()
        from ..runs.callbacks import MLflow, WandB
        from ..runs.tensorboard import TensorBoard

        kinds = {TensorBoard: self.tensorboard, MLflow: self.mlflow, WandB: self.wandb}
        return tuple(kind() for kind, is_on in kinds.items() if is_on)


ENDINGS = {"--json": (".json",), "--schema": (".yaml", ".yml", ".json")}
"""Option -> endings of its files; no other file that exists is replaced."""


def check_output_files(
    outputs: Mapping[str, Path | None],
    protected_files: Mapping[str, Path],
    endings: Mapping[str, Sequence[str]] = ENDINGS,
) -> None:
    """Refuse output files that cannot be written, that belong to a run, or that would replace files of another kind.

    `outputs` maps options to files, or to None where the option is not given.
    """
    files = dict(protected_files)
    for flag, path in outputs.items():
        if path is None:
            continue
        fault = _find_fault(path)
        if (folder := find_run_folder(path)) is not None:
            fault = fault or f"this is a file of the run in {folder}; give another file"
        for what, other in files.items():
            if path.exists() and other.exists():
                is_same = path.is_file() and path.samefile(other)
            else:
                is_same = os.path.realpath(path) == os.path.realpath(other)
            if is_same:
                fault = fault or f"this is {what}, which would be overwritten; give another file"
        if flag in endings and _holds_other(path, endings[flag]):
            fault = fault or f"this file exists, and is no {endings[flag][0]} file; give another one, or remove it"
        if fault:
            raise ConfigError(f"{flag} {path}: {fault}")
        files[f"the file of {flag}"] = path


def _holds_other(path: Path, endings: Sequence[str]) -> bool:
    """Tell whether a path is a file with content whose name has another ending than these."""
    file = Path(os.path.realpath(path))
    is_other = file.suffix.lower() not in endings and not is_stdout(path)
    return is_other and file.is_file() and file.stat().st_size > 0


def _find_fault(path: Path) -> str:
    """Tell why a file cannot be written; empty if it can be."""
    if path.is_dir():
        return "this is a folder; give the name of a file"
    if path.exists() and not path.is_file():  # a device or a pipe
        return "" if os.access(path, os.W_OK) else "this cannot be written to; give another file"
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}; make it first"
    return "" if os.access(folder, os.W_OK) else f"the folder {folder} cannot be written to; give another one"


def check_empty_folder(out: Path, advice: str = "") -> None:
    """Refuse a folder that is not empty; `advice` follows the advice to give a new one."""
    if out.is_dir() and any(out.iterdir()):
        raise RunError(
            f"{write_option('out')} {out}: the folder is not empty, and no file is overwritten; give a new one{advice}"
        )


def check_run_folder(out: Path, command: str | None = None) -> None:
    """Refuse a run folder that is not empty, or that cannot be made; `command` could resume a run in it."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{write_option('out')} {out}: this is a file; give a new or empty folder")
    advice = ""
    if command:
        resume = f"fedattune {command} --resume {shlex.quote(str(out))}"
        advice = f", or continue with the run in it by {resume}"
    check_empty_folder(out, advice)
    full = Path(os.path.realpath(out))
    nearest = next(folder for folder in (full, *full.parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(
            f"{write_option('out')} {out}: {nearest} is a file, in which no folder can be made; give another one"
        )
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"{write_option('out')} {out}: the folder {nearest} cannot be written to; give another one")


def choose_run_folder(command: str, data: str) -> Path:
    """Return a new folder under runs/, named after the command, the data and the time."""
    stem = f"{command}-{Path(data).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{again}" for again in range(2, 100))]
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())
