"""Log lines of the server and of the nodes: sentences, or one JSON object per line for log collectors."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from ..core.errors import FedAttuneError
from ..core.text import make_printable

LogFormat = Literal["text", "json"]
"""Format of log lines: sentences, or one JSON object per line."""

WARNING = re.compile(
    r"round \d+: |left out of the federation|a second node|metrics-port: |.*does not belong to this federation"
)
"""Beginnings of sentences about something that an administrator may have to fix."""

HEAD_FIELDS = {"run": "token", "method": "algorithm", "seed": "seed", "round": "round"}
"""Field of a log line -> key in the head of a message."""


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object: time (UTC), level, event, and the fields that are known."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        super().__init__()
        self._constants = dict(constants)

    def format(self, record: logging.LogRecord) -> str:
        # A traceback's text may hold data.
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        event = getattr(record, "without_data", None) or record.getMessage()
        line = {"time": time, "level": record.levelname.lower(), "event": event, **self._constants}
        line |= getattr(record, "fields", {})
        return json.dumps({key: value for key, value in line.items() if value is not None})


@contextmanager
def log_errors(log_format: LogFormat, get_fields: Callable[[str], Mapping[str, Any]]) -> Iterator[None]:
    """Log an error that ends the server as a line of JSON; in text, the server app prints its sentence."""
    try:
        yield
    except Exception as error:
        if log_format == "json":
            # The text of an error that is not FedAttune's may hold anything.
            event = str(error) if isinstance(error, FedAttuneError) else type(error).__name__
            open_log("server", log_format).error("%s", event, extra={"fields": get_fields(event)})
        raise


class StandardOutput(logging.Handler):
    """Print records. Flower replaces sys.stdout for each run, so no handler may keep an earlier one."""

    def emit(self, record: logging.LogRecord) -> None:
        print(make_printable(self.format(record)), flush=True)


def open_log(program: Literal["server", "node"], log_format: LogFormat, **constants: Any) -> logging.Logger:
    """Make the logger of a program print to the standard output."""
    handler = StandardOutput()
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter(constants) if is_json else logging.Formatter("fedattune: %(message)s"))
    logger = logging.getLogger(f"fedattune.{program}")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    return logger


def make_server_log(log_format: LogFormat, get_fields: Callable[[str], Mapping[str, Any]]) -> Callable[[str], None]:
    """Make the function that logs the server's sentences."""
    logger = open_log("server", log_format)

    def log(sentence: str) -> None:
        level = logging.WARNING if WARNING.match(sentence) else logging.INFO
        logger.log(level, "%s", sentence, extra={"fields": get_fields(sentence)})

    return log


def log_node(
    sentence: str,
    *,
    without_data: str | None = None,
    level: int = logging.WARNING,
    head: Mapping[str, Any] | None = None,
) -> None:
    """Log a sentence for the operator of the node; in JSON, for log collectors, `without_data` in its place."""
    fields = {name: (head or {}).get(key) for name, key in HEAD_FIELDS.items()}
    logger = logging.getLogger("fedattune.node")
    if not any(isinstance(one, StandardOutput) for one in logger.handlers):  # outside a node's program
        logger = open_log("node", "text")
    logger.log(level, "%s", sentence, extra={"fields": fields, "without_data": without_data})
