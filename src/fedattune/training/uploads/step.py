"""Define an upload step: what happens to uploads between the clients' training and the server rule.

Reference for the idea: `Postprocessor` of pfl-research, and optax's `chain`. Steps there see aggregates on the server;
here a step may look at single uploads, and says so by `needs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast, get_type_hints

import torch
from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter
from pydantic_core import PydanticSerializationError
from torch import Tensor

from ...core.algorithm import Branching, ServerUpdate
from ...core.errors import ConfigError, summarize_error
from ...core.faults import Fault
from ...core.params import Params, select_prefix
from ...core.payload import Payload, Traffic
from ...data import Federation
from ...runs.context import RunContext
from ...runs.rows import RowStack

State = TypeVar("State")


@dataclass(frozen=True)
class StepContext:
    """Facts that steps know from the beginning of a run.

    Attributes:
        run: the run.
        is_deployed: whether clients are real: randomness that protects them comes from the operating system.
        counts_are_claimed: whether sample counts are what others say.
        max_norm_ratio: ratio of an update's norm to the usual norm, above which it is rejected.
        has_one_model: whether the server makes one model for all clients.
        sees_uploads: whether single uploads can be looked at; else only their sum means anything.
    """

    run: RunContext
    is_deployed: bool = False
    counts_are_claimed: bool = False
    max_norm_ratio: float = 5.0
    has_one_model: bool = False
    sees_uploads: bool = True


@dataclass(frozen=True)
class RoundUploads:
    """The uploads of a round, one row for each of C clients.

    Attributes:
        round: number of the round, from 1.
        ids: (C,) numbers of the clients.
        sent: the payloads that they received; the model is the one from which they started.
        upload: what they upload.
        buffers: their BatchNorm statistics, if these are averaged.
        n: (C,) training samples, as the server rule will see them.
        statistics: the averaged statistics that they received.
        refused: clients that refused what they received.
        alone: clients that trained from their own models, as they refused, or are on trial.
        rejected: client -> why its upload was rejected; its row is gone.
        quarantined: clients in quarantine from this round on: no other client learns from them, nor they from others.
    """

    round: int
    ids: Tensor
    sent: Payload
    upload: Payload
    buffers: Params
    n: Tensor
    statistics: Params = field(default_factory=Params)
    refused: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()
    rejected: Mapping[int, Fault] = field(default_factory=dict)
    quarantined: frozenset[int] = frozenset()

    def from_start(self, rule: ServerUpdate[Any]) -> "RoundUploads":
        """Return the uploads with the models from which clients started, if they were sent several."""
        if not isinstance(rule, Branching) or not len(self.ids):
            return self
        start = {**self.sent.params, **rule.find_start(self.sent, self.upload)}
        return replace(self, sent=self.sent._replace(params=Params(start)))

    def reject(self, faults: Mapping[int, Fault]) -> "RoundUploads":
        """Return the uploads without some rows."""
        if not faults:
            return self
        ids = self.ids.tolist()
        rows = torch.tensor([row for row in range(len(ids)) if row not in faults], dtype=torch.int64)
        rows = rows.to(self.ids.device)
        new = {ids[row]: fault for row, fault in sorted(faults.items())}
        return replace(
            self,
            ids=self.ids[rows],
            sent=self.sent.rows(rows),
            upload=self.upload.rows(rows),
            buffers=self.buffers.rows(rows),
            n=self.n[rows],
            rejected={**self.rejected, **new},
        )


@dataclass(frozen=True)
class PastRounds:
    """Progress of a run, for reports.

    Attributes:
        rounds: finished rounds.
        repeats: rounds that may have been done twice with other noise, after an interruption.
    """

    rounds: int
    repeats: int = 0


@dataclass(frozen=True)
class Report:
    """Facts and notes of a step about a run.

    Attributes:
        facts: JSON values, which `Result.reports` has under the step's name.
        notes: sentences under the table; the method's name is put before each.
        common_notes: sentences that concern all methods of a comparison alike.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    common_notes: Sequence[str] = ()


class UploadStep(Generic[State]):
    """Transform the uploads of a round before the server rule aggregates them.

    A step without a state returns None from `init`. Other states are dataclasses of numbers, texts, lists, sets, dicts,
    tensors and `Params`. Checkpoints store them, so a run that goes on is the run that was not interrupted.

    Attributes:
        name: name of the step in reports and checkpoints.
        needs: `uploads` if the step looks at single uploads, `sums` if it works where only their sum means anything
            (secure aggregation, or noise that protects the sum).
        adds_noise: whether the step adds secret noise, so that a repeated round spends epsilon again.
    """

    name: ClassVar[str] = "custom"
    needs: Literal["uploads", "sums"] = "uploads"
    adds_noise: ClassVar[bool] = False

    def prepare_data(self, federation: Federation, context: RunContext) -> Federation:
        """Return the data on which clients of a simulation train."""
        return federation

    def collect_facts(self) -> Mapping[str, Any]:
        """Return facts about the run that are known before its first round."""
        return {}

    def init(self, context: StepContext) -> State:
        """Return the state of the server's side before the first round."""
        return cast(State, None)

    def init_memory(self, context: StepContext) -> Params:
        """Return the first memory of each client, which `on_client` reads and writes."""
        return Params()

    def on_client(self, uploads: RoundUploads, memory: Params, context: StepContext) -> tuple[RoundUploads, Params]:
        """Transform uploads where the clients are; return the uploads and the new memory (C, ...)."""
        return uploads, memory

    def on_server(self, state: State, uploads: RoundUploads, context: StepContext) -> tuple[State, RoundUploads]:
        """Transform the uploads at the server; return the new state and the uploads."""
        return state, uploads

    def count_bytes(self, traffic: Traffic, upload: Payload, context: StepContext) -> Traffic:
        """Return the bytes that clients upload, given the bytes of uploads that no step changed.

        Args:
            traffic: layer or extra -> bytes.
            upload: the uploads, as the server rule sees them.
            context: the run.
        """
        return traffic

    def report(self, state: State, past: PastRounds, context: StepContext) -> Report:
        """Return facts and notes about a run."""
        return Report()

    def measure(self, models: RowStack, buffers: RowStack, context: StepContext) -> Report:
        """Measure the judged models (E, ...) of a finished run; the facts join those of `report`."""
        return Report()


class StoredState(NamedTuple):
    """A step's state in a checkpoint: JSON values and tensors, by field."""

    values: dict[str, Any]
    tensors: dict[str, Tensor | Params]


def dump_state(step: UploadStep[Any], state: Any) -> StoredState:
    """Divide a step's state into what JSON and what tensor files hold.

    Raises:
        ConfigError: the state is no dataclass, or a field is of a type that no checkpoint holds.
    """
    if not is_dataclass(state):
        raise ConfigError(f"the upload step {step.name}: init returned {type(state).__name__}, expected a dataclass")
    kind: Any = type(state)
    content = {one.name: getattr(state, one.name) for one in fields(state)}
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor | Params)}
    try:
        adapters = _make_adapters(kind)
        values = {k: adapters[k].dump_python(v, mode="json") for k, v in content.items() if k not in tensors}
    except (PydanticSchemaGenerationError, PydanticSerializationError) as error:
        raise ConfigError(
            f"the upload step {step.name}: no checkpoint holds its state ({summarize_error(error)}); expected fields "
            "of numbers, texts, lists, sets, dicts, tensors or Params"
        ) from error
    return StoredState(values, tensors)


def load_state(state: State, values: Mapping[str, Any], tensors: Params) -> State:
    """Return the state that `dump_state` divided.

    Args:
        state: a state of the same type.
        values: the JSON values, by field.
        tensors: the tensors, by field, or by field/name for `Params`.
    """
    current: Any = state
    kind: Any = type(state)
    adapters = _make_adapters(kind)
    loaded = {name: adapters[name].validate_python(value) for name, value in values.items()}
    for name in adapters.keys() - values.keys():
        loaded[name] = tensors[name] if name in tensors else select_prefix(tensors, f"{name}/")
    restored: State = replace(current, **loaded)
    return restored


@cache
def _make_adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    hints, config = get_type_hints(kind), ConfigDict(arbitrary_types_allowed=True)
    # Pydantic takes no config for a field that is a dataclass itself, and takes it for a union.
    return {one.name: TypeAdapter(hints[one.name] | None, config=config) for one in fields(kind)}
