"""The audit log of a node: one line for each message that came and each reply that left, chained by hashes."""

import hashlib
import json
import os
from collections.abc import Mapping
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

PURPOSES: dict[tuple[Direction, str], str] = {
    ("in", "hello"): "The server asks for the names and sizes of the clients and the schema of their data.",
    ("in", "train"): "The server sends what the clients start from, and asks them to train.",
    ("in", "evaluate"): "The server sends models, and asks for their scores on the clients' data.",
    ("in", "unreadable"): "The server sends a message that this version of FedAttune cannot read.",
    ("out", "hello"): "The node tells the names and sizes of its clients and the schema of their data.",
    ("out", "trained"): "The node sends what its clients learned, and the scores of their models.",
    ("out", "evaluated"): "The node sends the scores of models on its clients' data.",
    ("out", "failed"): "The node could not do what was asked, and tells only the kind of the error.",
}
"""Direction and kind of a message -> its purpose; protocols add their own."""

NO_PURPOSE = "This version of the log has no sentence for the kind {!r}."

COLUMN_KEYS = ("kind", "token", "algorithm", "seed", "round")
"""Keys of a message's head that are keys of the log's line themselves."""

EVIDENCE = f"keep both {LOG_NAME} and {END_NAME} elsewhere as evidence, then the node begins a new log"

MAX_CHARS, MAX_ITEMS, MAX_KINDS = 200, 1000, 20
"""Length of texts, of lists and of the purpose in a line, where the server decides what stands there."""


class AuditLogError(RunError):
    """The audit log was changed, so the node adds nothing to it and sends nothing."""


class AuditLog:
    """The audit log in the folder of a node's state.

    Each line has the SHA-256 of the line before, so a change to any line shows in the next one. A second file keeps
    the number of lines and the last hash, so lines cut off or added at the end show, too. That file names the next line
    before the line is written: after a crash, the node takes over no other line. Somebody who may write to both files
    can still make a new log that looks right: only a copy of the last hash on another machine shows that.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self.end_file = folder / LOG_NAME, folder / END_NAME
        self._lock = FileLock(folder / ".audit.lock")

    def append(
        self, direction: Direction, message: WorkerMessage, request: Mapping[str, Any], n_bytes: int | None = None
    ) -> None:
        """Add a message, and return when the line is on the disk.

        Args:
            request: head of the server's message, which says to which run a reply belongs.
            n_bytes: bytes that came, if `message` only stands for a message that cannot be read.
        """
        entry = describe_message(direction, message, request)
        if n_bytes is not None:
            entry["bytes"] = n_bytes
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            end = self._find_end()
            text = json.dumps({"number": end["lines"] + 1, **entry, "before": end["sha256"]}, default=str)
            line = text.encode() + b"\n"
            self._write_end({**end, "next": _hash_line(line)})
            with self.file.open("ab") as log:
                log.write(line)
                log.flush()
                os.fsync(log.fileno())
            self._write_end(_add_line(end, line))

    def _find_end(self) -> dict[str, Any]:
        """Find the end of the log for the next line, and remove or take over what a crash left after it."""
        size = self.file.stat().st_size if self.file.exists() else 0
        end = _read_end(self.end_file)
        if end is None:
            if size:
                raise AuditLogError(f"{self.file} has lines, but {END_NAME} is missing; {EVIDENCE}")
            return {"lines": 0, "bytes": 0, "sha256": START}
        planned = end.pop("next", None)
        if size < end["bytes"]:
            raise AuditLogError(
                f"{self.file} has {size} bytes, expected {end['bytes']}: lines were cut off; {EVIDENCE}"
            )
        if size == end["bytes"]:
            return end
        with self.file.open("rb+") as log:
            log.seek(end["bytes"])
            rest = log.read()
            if planned is not None and b"\n" not in rest:  # half of a line
                log.truncate(end["bytes"])
                return end
        if planned is None or _hash_line(rest) != planned:
            raise AuditLogError(f"{self.file}: line {end['lines'] + 1} was not written by the node; {EVIDENCE}")
        return _add_line(end, rest)

    def _write_end(self, end: Mapping[str, Any]) -> None:
        write_text(self.end_file, json.dumps(end) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Read all lines; a line that is no JSON object is empty."""
        return [_read_line(line) for line in self._read_lines()]

    def verify(self) -> str | None:
        """Check the chain of hashes, and the end that the second file keeps; return a sentence on the first wrong line,
        or None.
        """
        self._read_lines()  # a lock would make the folder of a log that is not there
        try:
            with self._lock:
                lines, end = self._read_lines(), _read_end(self.end_file)
        except AuditLogError:
            return f"{END_NAME} is damaged, so nothing shows whether lines were cut off or added at the end"
        except OSError as error:
            raise RunError(
                f"cannot lock the audit log {self.file}: {error.strerror or error}; run the command as the user of "
                "the node, or give a copy of the folder"
            ) from error
        is_half = end is not None and "next" in end and len(lines) == end["lines"] + 1
        if is_half and not lines[-1].endswith(b"\n"):
            del lines[-1]  # a crash left it, and the node removes it with its next message
        before, hashes = START, []
        for number, line in enumerate(lines, start=1):
            entry = _read_line(line)
            if not entry or not line.endswith(b"\n"):
                return f"line {number} is damaged: it is no whole line of JSON"
            if entry.get("number") != number or entry.get("before") != before:
                changed = f"line {number - 1} was changed, or lines" if number > 1 else "lines"
                return f"{changed} before line {number} were removed or added: the hash in line {number} does not fit"
            before = _hash_line(line)
            hashes.append(before)
        if end is None:
            return f"{END_NAME} is missing, so nothing shows whether lines were cut off after line {len(lines)}"
        known = end["lines"]
        if known > len(lines):
            return f"lines {len(lines) + 1} to {known} were cut off the end"
        if known and hashes[known - 1] != end["sha256"]:
            return f"line {known} was changed: its hash is not the one in {END_NAME}"
        if hashes[known:] not in ([], [end.get("next")]):
            return f"line {known + 1} was not written by the node: {END_NAME} knows {known} lines"
        return None

    def _read_lines(self) -> list[bytes]:
        try:
            return self.file.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise RunError(
                f"cannot read the audit log {self.file}: {error.strerror or error}; name the folder of a node's state "
                "or its nodes/N.toml; a node writes the log with its first message"
            ) from error


def describe_message(direction: Direction, message: WorkerMessage, request: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a message for the log, without the values of its tensors. No message makes it fail.

    Texts and lists in the server's message are cut, so that the server cannot fill the node's disk by them.
    """
    head = message.head
    parts = head.get("parts")
    heads = [one for one in parts if isinstance(one, Mapping)] if isinstance(parts, list) else [head]
    kinds = list(dict.fromkeys(_shorten(one.get("kind")) for one in heads))[:MAX_KINDS]
    clients = head.get("clients", request.get("clients"))
    names = list(clients) if isinstance(clients, Mapping | list | tuple) else []
    tensors = []
    for name, value in message.tensors.items():
        # NumPy lacks some types of PyTorch, such as bfloat16.
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        about = {"name": _shorten(name), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        tensors.append({**about, "sha256": hashlib.sha256(content.data).hexdigest()})
    told = {key: value for key, value in head.items() if key not in COLUMN_KEYS}
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "direction": direction,
        "kind": _shorten(head.get("kind")),
        **{key: _cut(head.get(key, request.get(key))) for key in COLUMN_KEYS[1:]},
        "purpose": " ".join(PURPOSES.get((direction, one), NO_PURPOSE.format(one)) for one in kinds),
        "clients": _cut_list([one.get("name") if isinstance(one, Mapping) else one for one in names]),
        "bytes": count_bytes(message),
        "tensors": tensors,
        # What comes tells nothing about the node's own data; what leaves is kept word by word.
        "head": told if direction == "out" else _cut_list(sorted(map(str, told))),
    }


def count_bytes(message: WorkerMessage) -> int:
    """Count the bytes of a message: its tensors, and its head as JSON."""
    try:
        text = json.dumps(message.head, default=str)
    except (RecursionError, TypeError, ValueError):  # a list in a list, and so on; other keys than texts
        text = ""
    return message.nbytes() + len(text.encode())


def _cut(value: Any) -> Any:
    """Keep a short text, a number or None, and take the start of any other value's text."""
    return value if isinstance(value, int | float | None) else _shorten(value)


def _shorten(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} of too many levels"
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text):,} characters)"


def _cut_list(values: list[Any]) -> list[Any]:
    more = len(values) - MAX_ITEMS
    return [_cut(one) for one in values[:MAX_ITEMS]] + ([f"... and {more:,} more"] if more > 0 else [])


def _hash_line(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _add_line(end: Mapping[str, Any], line: bytes) -> dict[str, Any]:
    """Return the end of the log after one more line."""
    return {"lines": end["lines"] + 1, "bytes": end["bytes"] + len(line), "sha256": _hash_line(line)}


def _read_line(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _read_end(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    end = _read_line(file.read_bytes())
    counts, hashes = [end.get("lines"), end.get("bytes")], [end.get("sha256"), end.get("next", START)]
    if not all(isinstance(one, int) and one >= 0 for one in counts) or not all(isinstance(one, str) for one in hashes):
        raise AuditLogError(f"{file} is damaged; {EVIDENCE}")
    return end
