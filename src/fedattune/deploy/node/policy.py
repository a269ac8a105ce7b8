"""A node's own rules: consent to what it tells about its data, and limits that the server cannot change."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from pydantic import ConfigDict, Field, ValidationError, field_validator

from ...core.errors import ConfigError, RunError, summarize_error
from ...core.io import write_text
from ...core.options import Count, StrictSchema, describe_errors
from ...core.settings import Settings
from ...data.node import FLOWER_KEYS
from ...training.uploads.client_privacy import UploadAccounting
from ..logs import LogFormat, log_node
from ..secagg import LEAST_THRESHOLD

SHARED_NAME, APPROVED_NAME = "shared.json", "approved.json"


class NotApprovedError(RunError):
    """The node's operator has not approved what the node would tell about its data."""


class MaxRoundsError(RunError):
    """The server asks for more rounds than the node's `max-rounds`."""


class MaxBytesError(RunError):
    """The node would send more bytes in a run than its `max-bytes`."""


class MethodNotAllowedError(RunError):
    """The server asks for a method that is not in the node's `methods`."""


class PrivacyRequiredError(RunError):
    """The server asks for less noise than the node's `max-epsilon` or `max-record-epsilon` needs."""


class PrivacyBudgetError(RunError):
    """One more upload would spend more epsilon than the run's `dp-client`."""


MAX_DELTA = 1e-3
"""Largest delta of a run at a node that has `max-epsilon`."""


class NodePolicy(StrictSchema):
    """The rules in a node's configuration, and the format of its log."""

    model_config = ConfigDict(extra="ignore", alias_generator=lambda name: name.replace("_", "-"))

    consent: Literal["given", "ask"] = Field(
        "given", description="ask: wait for `fedattune node approve` before the node tells about its data"
    )
    max_rounds: Count | None = Field(
        None, description="highest round that the node takes part in; it trains at most twice as often"
    )
    max_bytes: Count | None = Field(None, description="bytes that the node sends in one run at most")
    max_epsilon: float | None = Field(
        None,
        gt=0,
        description="epsilon of each method and seed at most, by noise that this node adds itself (delta 1e-3 at most)",
    )
    max_record_epsilon: float | None = Field(
        None,
        gt=0,
        description="epsilon of each training row, method and seed at most, by noise on this node's gradients (delta "
        "1e-3 at most)",
    )
    methods: str | None = Field(None, description="methods that the node trains, with commas between")
    log_format: LogFormat = Field("text", description="format of the node's log: text, or one JSON object per line")
    secure_aggregation: Literal["allowed", "required"] = Field(
        "allowed", description="required: the node trains for sums over nodes only, whatever the server asks"
    )
    min_participants: Annotated[int, Field(ge=3)] = Field(
        3, description="nodes in every sum that the node helps to make, at least"
    )
    threshold: Annotated[float, Field(lt=1)] = Field(
        LEAST_THRESHOLD, description="share of a session's nodes, from 2/3; only more of them can take off masks"
    )
    key: str | None = Field(None, description="file of the node's private key, for secure aggregation")
    roster: str | None = Field(None, description="file of all nodes' public keys, for secure aggregation")

    @field_validator("threshold")
    @classmethod
    def _check_threshold(cls, share: float) -> float:
        if share < LEAST_THRESHOLD:
            raise ValueError(
                "expected 2/3 (0.6667) at least: with less, a server that shows nodes two lists of survivors opens a "
                "node's upload with the help of less than a third of the nodes"
            )
        return share

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "NodePolicy":
        """Read the rules in a node's configuration; an error names all values that are impossible."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            phrases = describe_errors(error, lambda key: key.replace("_", "-"))
            raise ConfigError(f"the node's configuration: {'; '.join(phrases)}") from error

    def describe(self) -> str:
        """List the rules that every node has; those of secure aggregation have a check of their own."""
        hidden = {"log_format", "secure_aggregation", "min_participants", "threshold", "key", "roster"}
        rules = self.model_dump(by_alias=True, exclude_none=True, exclude=hidden)
        return ", ".join(f"{key} = {value}" for key, value in rules.items())

    def check_run(self, methods: Iterable[str], rounds: int) -> None:
        """Compare what the server asks for with the node's limits."""
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

    def check_privacy(self, settings: Settings) -> None:
        """Compare the noise that a run asks for with the node's limits."""
        delta, client, record = settings.privacy.delta, settings.privacy.client, settings.privacy.record
        max_epsilon, epsilon = self.max_record_epsilon, None if record is None else record.epsilon
        if max_epsilon is not None and (epsilon is None or epsilon > max_epsilon or delta > MAX_DELTA):
            asked = "none" if epsilon is None else f"dp-record {epsilon:g}"
            raise PrivacyRequiredError(
                f"this node has max-record-epsilon {max_epsilon:g}, and the run's differential privacy of rows is: "
                f"{asked}, at delta {delta:g}; the run needs dp-record {max_epsilon:g} or less, and dp-delta "
                f"{MAX_DELTA:g} or less"
            )
        max_epsilon, epsilon = self.max_epsilon, None if client is None else client.epsilon
        where = client.where if client else None
        if max_epsilon is not None and (
            epsilon is None or where != "local" or epsilon > max_epsilon or delta > MAX_DELTA
        ):
            asked = "none" if epsilon is None else f"dp-client {epsilon:g}, {where}"
            raise PrivacyRequiredError(
                f"this node has max-epsilon {max_epsilon:g}, and the run's differential privacy is: {asked}, at delta "
                f"{delta:g}; the run needs dp-client {max_epsilon:g} or less, dp-client-where local, and dp-delta "
                f"{MAX_DELTA:g} or less"
            )

    @staticmethod
    def count_uploads(folder: Path, uploads: int, accounting: UploadAccounting) -> None:
        """Count noised uploads before they are made: each one spends epsilon, also one that is lost and made again."""
        file, target = folder / "uploads.json", accounting.noise.epsilon
        total = _read_count(file, "uploads") + uploads
        if target is not None and accounting.epsilon(total) > target:
            raise PrivacyBudgetError(
                f"this would be noised upload {total} of this method and seed, and dp-client {target:g} allows "
                f"{accounting.settings.rounds} (an upload that the server asks for again counts again); the budget is "
                "spent"
            )
        _write(file, json.dumps({"uploads": total}) + "\n")

    def count_trained(self, folder: Path, rounds: int, private_rounds: int | None = None) -> None:
        """Count trainings before they begin: the server could give many trainings the same round.

        A round is trained again if its reply was lost, so twice `max-rounds` trainings are allowed.
        """
        file = folder / "trained.json"
        trained = _read_count(file, "rounds") + rounds
        if private_rounds is not None and trained > private_rounds:
            raise PrivacyBudgetError(
                f"this would be training {trained} of this method and seed, and the noise that protects the rows of "
                f"this node is made for {private_rounds}: its privacy budget is spent (a round that the server repeats "
                "counts again); a new run needs a new budget"
            )
        if self.max_rounds is not None and trained > 2 * self.max_rounds:
            raise MaxRoundsError(
                f"this would be training {trained} of this method and seed, and this node allows {2 * self.max_rounds} "
                "(a round that the server repeats counts again); raise `max-rounds` in the node's configuration if it "
                "may train longer"
            )
        _write(file, json.dumps({"rounds": trained}) + "\n")

    def count_sent(self, folder: Path, n_bytes: int) -> None:
        """Count the bytes of a reply before it leaves."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "sent.json"
        with FileLock(folder / ".sent.lock"):
            sent = _read_count(file, "bytes") + n_bytes
            if self.max_bytes is not None and sent > self.max_bytes:
                raise MaxBytesError(
                    f"with this reply the node would have sent {sent:,} bytes in this run, and it allows "
                    f"{self.max_bytes:,}; raise `max-bytes` in the node's configuration if it may send more"
                )
            write_text(file, json.dumps({"bytes": sent}) + "\n")

    def check_consent(self, folder: Path, shared: Mapping[str, Any]) -> None:
        """Write down what the node tells about its data, and check that its operator has approved exactly that.

        The text goes to `shared.json` and, when it changes, to the node's log.
        """
        file = folder / SHARED_NAME
        text = json.dumps(shared, indent=2, sort_keys=True, ensure_ascii=False) + "\n"  # equal for equal contents
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            _write(file, text)
            log_node(
                f"the node tells the server this about its data:\n{text}",
                without_data=f"what the node tells the server about its data is new: see {SHARED_NAME}",
                level=logging.INFO,
            )
        if self.consent == "ask" and _read_approval(folder).get("sha256") != _hash_text(text):
            raise NotApprovedError(
                f"nobody has approved what this node tells the server, {file}; read it, and run: "
                "fedattune node approve nodes/N.toml"
            )

    def hide_problem(self, folder: Path, schema: str | None, problem: Exception) -> Exception:
        """Return the error for data that cannot be read by the server's schema.

        Whether data fit a schema tells something about them. So without consent to this schema, the server learns only
        that there is none.
        """
        approved = _read_approval(folder).get("schema")
        if self.consent == "given" or (approved and (schema is None or approved == _hash_schema(schema))):
            return problem
        return NotApprovedError(
            f"{summarize_error(problem)}; the server does not learn this, because nobody has approved its schema"
        )


OTHER_KEYS = (*(str(field.alias) for field in NodePolicy.model_fields.values()), *FLOWER_KEYS)
"""Keys of a node's configuration that are not about its data."""


def read_shared(folder: Path) -> tuple[str, str]:
    """Read what the node would tell about its data, and compute its SHA-256."""
    file = folder / SHARED_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot read {file}: {error.strerror or error}; the node writes it when the server asks for the first "
            "time, so start the node and a run, then approve"
        ) from error
    return text, _hash_text(text)


def approve_shared(folder: Path, text: str) -> None:
    """Approve that the node tells the server exactly this about its data."""
    approval = {
        "sha256": _hash_text(text),
        "schema": _hash_schema(json.dumps(json.loads(text).get("schema"))),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_text(folder / APPROVED_NAME, json.dumps(approval) + "\n")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)


def _hash_schema(schema: str) -> str:
    return _hash_text(json.dumps(json.loads(schema), sort_keys=True))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_approval(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / APPROVED_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # a damaged approval is none
        return {}


def _read_count(file: Path, key: str) -> int:
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))[key])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f'{file} is damaged, so the node cannot know what it has sent or trained; write {{"{key}": N}} into it, '
            "with the number that `fedattune node audit` shows"
        ) from error
