"""A node's own rules: consent to what it tells about its data, and limits that the server cannot change."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import ConfigDict, Field, ValidationError

from ...core.errors import ConfigError, RunError
from ...core.io import write_text
from ...core.options import Count, StrictSchema, describe_errors
from .logs import LogFormat, log_node

SHARED_NAME, APPROVED_NAME = "shared.json", "approved.json"


class NotApprovedError(RunError):
    """The node's operator has not approved what the node would tell about its data."""


class MaxRoundsError(RunError):
    """The server asks for more rounds than the node's `max-rounds`."""


class MaxBytesError(RunError):
    """The node would send more bytes in a run than its `max-bytes`."""


class MethodNotAllowedError(RunError):
    """The server asks for a method that is not in the node's `methods`."""


class NodePolicy(StrictSchema):
    """The rules in a node's configuration, and the format of its log."""

    model_config = ConfigDict(extra="ignore", alias_generator=lambda name: name.replace("_", "-"))

    consent: Literal["given", "ask"] = Field(
        "given", description="ask: wait for `fedattune node approve` before the node tells about its data"
    )
    max_rounds: Count | None = Field(None, description="highest round that the node takes part in")
    max_bytes: Count | None = Field(None, description="bytes that the node sends in one run at most")
    methods: str | None = Field(None, description="methods that the node trains, with commas between")
    log_format: LogFormat = Field(
        "text", description="format of the node's log: text, or one JSON object per line"
    )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "NodePolicy":
        """Read the rules in a node's configuration.

        Args:
            config: the node's configuration; other keys are not looked at.

        Raises:
            ConfigError: a value is impossible; the message names them all.

        """
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            phrases = describe_errors(error, lambda key: key.replace("_", "-"))
            raise ConfigError(f"the node's configuration: {'; '.join(phrases)}") from error

    def check_run(self, methods: Iterable[str], rounds: int) -> None:
        """Compare what the server asks for with the node's limits.

        Args:
            methods: names of the methods.
            rounds: number of rounds, or the number of one round.

        Raises:
            MethodNotAllowedError: a method is not allowed.
            MaxRoundsError: these are too many rounds.

        """
        if self.methods is not None:
            allowed = [name for name in re.split(r"[\s,]+", self.methods) if name]
            if others := [name for name in methods if name not in allowed]:
                raise MethodNotAllowedError(
                    f"the server asks for the method {others[0]!r}, and this node allows only {', '.join(allowed)}; "
                    "add it to `methods` in the node's configuration if it may be trained here"
                )
        if self.max_rounds is not None and rounds > self.max_rounds:
            raise MaxRoundsError(
                f"the server asks for {rounds} rounds, and this node allows {self.max_rounds}; raise `max-rounds` in "
                "the node's configuration if it may take part longer"
            )

    def count_sent(self, folder: Path, n_bytes: int) -> None:
        """Count the bytes of a reply before it leaves.

        Args:
            folder: folder of the run on this node, which keeps the count.
            n_bytes: bytes of the reply.

        Raises:
            MaxBytesError: the run would have sent too much; nothing is counted then.

        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "sent.json"
        with FileLock(folder / ".sent.lock"):
            sent = _read_count(file) + n_bytes
            if self.max_bytes is not None and sent > self.max_bytes:
                raise MaxBytesError(
                    f"with this reply the node would have sent {sent:,} bytes in this run, and it allows "
                    f"{self.max_bytes:,}; raise `max-bytes` in the node's configuration if it may send more"
                )
            write_text(file, json.dumps({"bytes": sent}) + "\n")

    def check_consent(self, folder: Path, shared: Mapping[str, Any]) -> None:
        """Write down what the node tells about its data, and check that its operator has approved exactly that.

        The text goes to `shared.json` and, when it changes, to the node's log.

        Args:
            folder: the folder of the node's state.
            shared: the content.

        Raises:
            NotApprovedError: `consent` is `ask`, and this content is not approved.

        """
        folder.mkdir(parents=True, exist_ok=True)
        file, text = folder / SHARED_NAME, format_shared(shared)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write_text(file, text)
            log_node(
                f"the node tells the server this about its data:\n{text}",
                without_data=f"what the node tells the server about its data is new: see {SHARED_NAME}",
                level=logging.INFO,
            )
        if self.consent == "ask" and _read_approval(folder) != _hash_text(text):
            raise NotApprovedError(
                f"nobody has approved what this node tells the server, {file}; read it, and run: "
                "fedattune node approve nodes/N.toml"
            )


def format_shared(shared: Mapping[str, Any]) -> str:
    """Format what a node tells about its data; equal contents give equal texts."""
    return json.dumps(shared, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def approve_shared(folder: Path) -> tuple[str, str]:
    """Approve what is in `shared.json` now.

    Args:
        folder: the folder of the node's state.

    Returns:
        The approved text, and its SHA-256.

    Raises:
        RunError: there is nothing to approve.

    """
    file = folder / SHARED_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot read {file}: {error.strerror or error}; the node writes it when the server asks for the first "
            "time, so start the node and a run, then approve"
        ) from error
    digest = _hash_text(text)
    approval = {"sha256": digest, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    write_text(folder / APPROVED_NAME, json.dumps(approval) + "\n")
    return text, digest


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_approval(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / APPROVED_NAME).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):  # a damaged approval is none
        return None


def _read_count(file: Path) -> int:
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["bytes"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f'{file} is damaged, so the node cannot know how much it has sent; write {{"bytes": N}} into it, with '
            "the number that `fedattune node audit` shows"
        ) from error
