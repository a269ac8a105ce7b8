"""Requests of the administrator to a run that is going on: a file in the run folder, which the server reads."""

from pathlib import Path
from typing import Literal

from ...analysis.monitor import FEDERATION_FILE
from ...core.errors import RunError
from ...core.io import read_json, write_json

CONTROL_FILE = "control.json"
"""The request to a run, in its run folder."""

ControlRequest = Literal["pause", "abort"]


def write_request(folder: Path, request: ControlRequest | None) -> None:
    """Ask the run in a folder to pause or to end after its current round; None takes the request back."""
    if not (folder / FEDERATION_FILE).exists():
        raise RunError(
            f"{folder} holds no run of a federation, expected a folder with {FEDERATION_FILE}; give the run-folder "
            "of the run, such as deployment/runs/deployment"
        )
    if request is None:
        (folder / CONTROL_FILE).unlink(missing_ok=True)
    else:
        write_json(folder / CONTROL_FILE, {"request": request})


def read_request(folder: Path) -> ControlRequest | None:
    """Read the request to the run in a folder; None if there is none."""
    file = folder / CONTROL_FILE
    try:
        content = read_json(file)
    except RunError as error:
        if isinstance(error.__cause__, FileNotFoundError):  # also if somebody takes it back right now
            return None
        raise
    request = content.get("request") if isinstance(content, dict) else None
    if request not in ("pause", "abort"):
        raise RunError(f"{file} holds {request!r}, expected pause or abort; remove the file")
    return request  # type: ignore[no-any-return]


def open_requests(folder: Path) -> None:
    """Drop an old request to pause at the start of the server; a run that was aborted does not go on."""
    request = read_request(folder)
    if request == "abort":
        raise RunError(
            f"the run in {folder} was aborted; take a new run-folder, or take the request back by fedattune deploy "
            "resume and this folder"
        )
    if request:
        write_request(folder, None)
