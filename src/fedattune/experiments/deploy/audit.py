"""The audit log of a node: one line for each message that came and each reply that left, chained by hashes."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock

from ...core.errors import RunError
from ...core.io import write_text
from ...training.backends.message import WorkerMessage

LOG_NAME, END_NAME = "audit.jsonl", "audit-end.json"

START = "0" * 64
"""The hash before the first line."""

Direction = Literal["in", "out"]

PURPOSES = {
    ("in", "hello"): "The server asks for the names and sizes of the clients and the schema of their data.",
    ("in", "train"): "The server sends what the clients start from, and asks them to train.",
    ("in", "evaluate"): "The server sends models, and asks for their scores on the clients' data.",
    ("out", "hello"): "The node tells the names and sizes of its clients and the schema of their data.",
    ("out", "trained"): "The node sends what its clients learned, and the scores of their models.",
    ("out", "evaluated"): "The node sends the scores of models on its clients' data.",
    ("out", "failed"): "The node could not do what was asked, and tells only the kind of the error.",
}
"""Direction and kind of a message -> its purpose."""

NO_PURPOSE = "This version of the log has no sentence for the kind {!r}."

COLUMN_KEYS = ("kind", "token", "algorithm", "seed", "round")
"""Keys of a message's head that are keys of the log's line themselves."""


class AuditLogError(RunError):
    """The audit log was changed, so the node adds nothing to it and sends nothing."""


class AuditLog:
    """The audit log in the folder of a node's state.

    Each line has the SHA-256 of the line before, so a change to any line shows in the next one. A second file keeps
    the number of lines and the last hash, so lines cut off the end show, too. Somebody who may write to both files
    can still make a new log that looks right: only a copy of the last hash on another machine shows that.

    Args:
        folder: the folder of the node's state.

    """

    def __init__(self, folder: Path) -> None:
        self.file, self.end_file = folder / LOG_NAME, folder / END_NAME
        self._lock = FileLock(folder / ".audit.lock")

    def append(self, direction: Direction, message: WorkerMessage, request: Mapping[str, Any]) -> None:
        """Add a message, and return when the line is on the disk.

        Args:
            direction: `in` for a message of the server, `out` for a reply.
            message: the message.
            request: head of the server's message, which says to which run a reply belongs.

        Raises:
            AuditLogError: the log was changed or shortened.

        """
        entry = describe_message(direction, message, request)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self._open_end() as end:
            line = json.dumps({"number": end["lines"] + 1, **entry, "before": end["sha256"]}) + "\n"
            with self.file.open("ab") as log:
                log.write(line.encode())
                log.flush()
                os.fsync(log.fileno())
            end.update(
                lines=end["lines"] + 1, bytes=end["bytes"] + len(line.encode()), sha256=_hash_line(line)
            )

    @contextmanager
    def _open_end(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the log to be changed: number of lines, bytes, and the last line's hash."""
        end = _read_end(self.end_file) or {"lines": 0, "bytes": 0, "sha256": START}
        size = self.file.stat().st_size if self.file.exists() else 0
        if size < end["bytes"]:
            raise AuditLogError(
                f"{self.file} has {size} bytes, expected {end['bytes']}: lines were cut off; keep both {LOG_NAME} and "
                f"{END_NAME} elsewhere as evidence, then the node begins a new log"
            )
        if size > end["bytes"]:
            self._settle_crash(end)
        yield end
        write_text(self.end_file, json.dumps(end) + "\n")

    def _settle_crash(self, end: dict[str, Any]) -> None:
        """Take over the one line that a crash left after the known end, or remove its half."""
        with self.file.open("rb+") as log:
            log.seek(end["bytes"])
            rest = log.read()
            if not rest.endswith(b"\n"):
                last = rest.rfind(b"\n") + 1
                rest = rest[:last]
                log.truncate(end["bytes"] + last)
        for line in rest.decode(errors="replace").splitlines(keepends=True):
            if _read_line(line).get("before") != end["sha256"]:
                raise AuditLogError(
                    f"{self.file}: line {end['lines'] + 1} was not written by the node; keep both {LOG_NAME} and "
                    f"{END_NAME} elsewhere as evidence, then the node begins a new log"
                )
            end.update(
                lines=end["lines"] + 1, bytes=end["bytes"] + len(line.encode()), sha256=_hash_line(line)
            )

    def read(self) -> list[dict[str, Any]]:
        """Read all lines; a line that is no JSON object is empty.

        Raises:
            RunError: there is no log.

        """
        return [_read_line(line) for line in self._read_lines()]

    def verify(self) -> str | None:
        """Check the chain of hashes, and the end that the second file keeps.

        Returns:
            A sentence that names the first wrong line; None if nothing is wrong.

        Raises:
            RunError: there is no log.

        """
        with self._lock:
            lines, end = self._read_lines(), _read_end(self.end_file)
        before, hashes = START, []
        for number, line in enumerate(lines, start=1):
            entry = _read_line(line)
            if not entry or not line.endswith("\n"):
                return f"line {number} is damaged: it is no whole line of JSON"
            if entry.get("number") != number or entry.get("before") != before:
                changed = f"line {number - 1} was changed, or lines" if number > 1 else "lines"
                return f"{changed} before line {number} were removed or added: the hash in line {number} does not fit"
            before = _hash_line(line)
            hashes.append(before)
        if end is None:
            return (
                f"{END_NAME} is missing, so nothing shows whether lines were cut off after line {len(lines)}"
            )
        if end["lines"] > len(lines):
            return f"lines {len(lines) + 1} to {end['lines']} were cut off the end"
        if end["lines"] and hashes[end["lines"] - 1] != end["sha256"]:
            return f"line {end['lines']} was changed: its hash is not the one in {END_NAME}"
        if end["lines"] < len(lines) - 1:  # a crash leaves one line at most
            return (
                f"line {end['lines'] + 1} was not written by the node: {END_NAME} knows {end['lines']} lines"
            )
        return None

    def _read_lines(self) -> list[str]:
        try:
            return self.file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        except OSError as error:
            raise RunError(
                f"cannot read the audit log {self.file}: {error.strerror or error}; name the folder of a node's state "
                "or its nodes/N.toml; a node writes the log with its first message"
            ) from error


def describe_message(
    direction: Direction, message: WorkerMessage, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a message for the log, without the values of its tensors.

    Args:
        direction: `in` for a message of the server, `out` for a reply.
        message: the message.
        request: head of the server's message.

    """
    head, kind = message.head, str(message.head.get("kind"))
    kinds = dict.fromkeys(str(part.get("kind")) for part in head.get("parts", [head]))
    clients = head.get("clients", request.get("clients", ()))
    tensors = [
        {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "sha256": _hash_tensor(value),
        }
        for name, value in message.tensors.items()
    ]
    told = {key: value for key, value in head.items() if key not in COLUMN_KEYS}
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "direction": direction,
        "kind": kind,
        **{key: head.get(key, request.get(key)) for key in COLUMN_KEYS[1:]},
        "purpose": " ".join(PURPOSES.get((direction, one), NO_PURPOSE.format(one)) for one in kinds),
        "clients": [one["name"] if isinstance(one, Mapping) else one for one in clients],
        "bytes": count_bytes(message),
        "tensors": tensors,
        # What comes tells nothing about the node's own data; what leaves is kept word by word.
        "head": told if direction == "out" else sorted(told),
    }


def count_bytes(message: WorkerMessage) -> int:
    """Count the bytes of a message: its tensors, and its head as JSON."""
    return message.nbytes() + len(json.dumps(message.head, default=str).encode())


def _hash_tensor(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _hash_line(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _read_line(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _read_end(file: Path) -> dict[str, Any] | None:
    """Read the end of the log; None if the file is missing.

    Raises:
        AuditLogError: the file is damaged.

    """
    if not file.exists():
        return None
    end = _read_line(file.read_text(encoding="utf-8", errors="replace"))
    if not (isinstance(end.get("lines"), int) and isinstance(end.get("bytes"), int) and "sha256" in end):
        raise AuditLogError(
            f"{file} is damaged; keep it and {LOG_NAME} elsewhere as evidence, then the node begins a new log"
        )
    return end
