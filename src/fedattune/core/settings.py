"""The typed settings of a training run; the one schema behind Python, YAML files and the command line."""

import re
from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from .errors import ConfigError, did_you_mean
from .options import StrictSchema, describe_errors

MAX_COUNT, MAX_CLIENTS = 1_000_000, 10_000_000


SEED_LIMIT = 2**32  # seeds are below this, for NumPy's legacy generator takes no others


MAX_FLOAT32 = 1e38  # of float32


PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]


Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]


class Settings(StrictSchema):
    """How one algorithm is trained on one federation: everything but the data, the model and the method.

    Examples:
        >>> settings = Settings(rounds=20, lr=0.05, cohort=0.5)
        >>> settings.local_steps, settings.cohort_size(10)
        (20, 5)
        >>> Settings.from_keywords(round=20)
        Traceback (most recent call last):
        ...
        fedattune.core.errors.ConfigError: unknown setting 'round'; did you mean 'rounds'? (known: ...)

    """

    model_config = ConfigDict(extra="forbid")

    rounds: PositiveInt = Field(50, description="communication rounds")
    cohort: int | float = Field(
        1.0, description="clients asked per round: a whole number, or a fraction of all (1.0 = everybody)"
    )
    train: Literal["method", "cohort", "all"] = Field(
        "method", description="who trains each round: as the method says, only the cohort, or all clients"
    )
    steps: PositiveInt | None = Field(
        None, description="local mini-batch steps per round (20 if neither steps nor epochs is given)"
    )
    epochs: PositiveInt | None = Field(None, description="local epochs per round, instead of steps")
    batch_size: PositiveInt = Field(20, description="samples in a mini-batch")
    lr: Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)] = Field(
        0.02, description="local learning rate"
    )
    weight_decay: Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="l2 coefficient added to every gradient, of every method alike (default: the method's)",
    )
    bn_affine: Literal["average", "local"] = Field(
        "average", description="scale and shift of BatchNorm layers: shared as other tensors, or never sent"
    )
    bn_buffers: Literal["local", "average"] = Field(
        "local", description="running statistics of BatchNorm layers: kept by each client, or averaged"
    )
    drop_out: float = Field(
        0.0, ge=0, lt=1, description="probability that a client asked in a round is gone before it uploads"
    )
    held_out: Annotated[int, Field(ge=0, le=MAX_CLIENTS)] = Field(
        0, description="clients that take no part in training and join after it"
    )
    join_rounds: PositiveInt = Field(
        5, description="rounds of its own that a client has which joins after training"
    )
    seed: Seed = Field(0, description="seed of initial model, cohorts and batches")
    engine: Literal["auto", "loop", "batched", "ray"] = Field(
        "auto",
        description="one client at a time, all clients of a round as one batch of models, or clients on actors of Ray",
    )
    ray_address: str | None = Field(
        None,
        description="with engine ray: HOST:PORT of a running cluster, or auto to find that of this machine (default: "
        "this machine alone)",
    )
    ray_actors: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(
        None,
        description="with engine ray: actors that hold the clients (default: one per core or share of a GPU)",
    )
    ray_gpus: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        0.0, description="with engine ray: share of a GPU that each actor takes"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors live")
    client_state: Literal["auto", "memory", "disk"] = Field(
        "auto", description="where the rows of all clients are kept: in memory up to 1 GiB, else on disk"
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="floating-point type")
    mixed_precision: Literal["off", "bfloat16"] = Field(
        "off",
        description="matrix products and convolutions of training in this type, where the device has it",
    )
    eval_every: PositiveInt = Field(
        1, description="evaluate clients every so many rounds (and after the last one)"
    )
    eval_clients: Annotated[int, Field(ge=1, le=MAX_CLIENTS)] | None = Field(
        None,
        description="clients that are evaluated, drawn once (default: all; of more than 10,000 clients, 1,000)",
    )

    @field_validator("cohort", mode="before")
    @classmethod
    def _number_or_fraction(cls, value: object) -> object:
        """Read "10" as ten clients and "0.5" or "1.0" as a share of all."""
        if isinstance(value, str):
            try:
                return float(value) if {".", "e"} & set(value.lower()) else int(value)
            except ValueError:
                raise ValueError(
                    "expected a number of clients such as 10, or a fraction such as 0.5"
                ) from None
        return value

    @field_validator("cohort")
    @classmethod
    def _some_or_all(cls, value: int | float) -> int | float:
        if not (1 <= value <= MAX_CLIENTS if isinstance(value, int) else 0 < value <= 1):
            raise ValueError(
                f"expected a number of clients from 1 to {MAX_CLIENTS:,}, or a fraction between 0 and 1"
            )
        return value

    @field_validator("epochs")
    @classmethod
    def _one_unit(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        if epochs and info.data.get("steps"):
            raise ValueError(f"give steps ({info.data['steps']}) or epochs, not both")
        return epochs

    @field_validator("ray_address")
    @classmethod
    def _place(cls, address: str | None) -> str | None:
        if address is None or address in {"auto", "local"} or re.fullmatch(r"[^\s:/]+:\d{1,5}", address):
            return address
        raise ValueError(
            "expected HOST:PORT of a Ray cluster that this machine is part of, such as 192.0.2.7:6379, or auto"
        )

    @field_validator("ray_address", "ray_actors", "ray_gpus")
    @classmethod
    def _of_ray(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("engine", "ray") != "ray":
            raise ValueError(f"it goes with engine ray alone, and the engine is {info.data['engine']}")
        return value

    @classmethod
    def from_keywords(cls, **values: Any) -> Self:
        """Settings from keywords.

        Raises:
            ConfigError: unknown settings or impossible values, all of them in one message.

        """
        try:
            return cls(**values)
        except ValidationError as error:
            phrases = describe_errors(
                error, unknown=lambda key: f"unknown setting {key!r}; {did_you_mean(key, cls.model_fields)}"
            )
            raise ConfigError("; ".join(phrases)) from error

    @property
    def local_steps(self) -> int | None:
        """Local steps per round; None when epochs are given."""
        return None if self.epochs else self.steps or 20

    def all_steps(self, samples: float) -> int:
        """Local steps of a whole run by a client with so many training samples that takes part in every round."""
        return self.rounds * (self.local_steps or (self.epochs or 1) * ceil(samples / self.batch_size))

    def cohort_size(self, n_clients: int) -> int:
        """Clients asked per round, of `n_clients`; a fraction is rounded, at least one client.

        Raises:
            ConfigError: more are asked than there are.
        """
        if isinstance(self.cohort, int):
            if self.cohort > n_clients:
                raise ConfigError(
                    f"cohort: got {self.cohort} clients per round, expected at most the {n_clients} that there are, "
                    "or a fraction such as 0.5"
                )
            return self.cohort
        return max(1, round(self.cohort * n_clients))


RAY_DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in Settings.model_fields.items() if name.startswith("ray_")
}
"""Settings that go with the engine ray alone, and what they are where nothing is given."""


EngineName = Literal["auto", "loop", "batched", "ray"]
"""How clients are run; see `Settings.engine`."""
