"""Define the settings of a training run: one schema for Python, YAML files and the command line."""

import re
from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from .errors import ConfigError, did_you_mean
from .options import Count, StrictSchema, describe_errors

MAX_CLIENTS = 10_000_000
SEED_LIMIT = 2**32
"""Seeds are smaller: NumPy's legacy generator takes no others."""
MAX_FLOAT32 = 1e38
MAX_COUNT = 1_000_000
LARGEST_UPDATE = 5.0
"""Ratio of an update's norm to the usual norm, above which it is rejected, unless a deployment says another."""
Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]
EngineName = Literal["auto", "sequential", "vectorized", "ray"]
"""Name of an engine; see `Settings.engine`."""
EarlyStopping = Literal["loss", "accuracy", "off"]
"""What chooses the round of each client's model; see `Settings.early_stopping`."""


class Settings(StrictSchema):
    """Settings of a run: everything except the data, the model and the method.

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

    rounds: Count = Field(50, description="communication rounds")
    cohort: int | float = Field(
        1.0, description="clients per round: a whole number, or a fraction of all clients (1.0 = all)"
    )
    train: Literal["method", "cohort", "all"] = Field(
        "method", description="clients that train in each round: as the method says, only the cohort, or all"
    )
    steps: Count | None = Field(
        None, description="local mini-batch steps per round (default: 20; for a table, one epoch instead)"
    )
    epochs: Count | None = Field(None, description="local epochs per round, instead of steps")
    batch_size: Count = Field(20, description="samples in a mini-batch")
    lr: Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)] = Field(
        0.02, description="local learning rate"
    )
    weight_decay: Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="l2 coefficient of every gradient, the same for all methods (default: the method's)",
    )
    bn_affine: Literal["average", "local"] = Field(
        "average", description="scale and shift of BatchNorm layers: averaged, or kept by each client"
    )
    bn_buffers: Literal["local", "average"] = Field(
        "local", description="running statistics of BatchNorm layers: kept by each client, or averaged"
    )
    drop_out: float = Field(
        0.0, ge=0, lt=1, description="probability that a client of the cohort drops out before it uploads"
    )
    held_out: Annotated[int, Field(ge=0, le=MAX_CLIENTS)] = Field(
        0, description="clients that join only after training"
    )
    join_rounds: Count = Field(5, description="rounds for clients that join after training")
    seed: Seed = Field(0, description="seed of initial model, cohorts and batches")
    engine: EngineName = Field(
        "auto",
        description="how clients run: one at a time (sequential), all of a round as one batch (vectorized), or on Ray",
    )
    ray_address: str | None = Field(
        None,
        description="with engine ray: HOST:PORT of a running cluster, or auto for the cluster of this machine "
        "(default: this machine alone)",
    )
    ray_actors: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(
        None,
        description="with engine ray: actors that hold the clients (default: one per core or share of a GPU)",
    )
    ray_gpus: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        0.0, description="with engine ray: share of a GPU that each actor takes"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of the tensors")
    client_state: Literal["auto", "memory", "disk"] = Field(
        "auto",
        description="storage of the clients' tensors: memory, disk, or auto (memory up to 1 GiB, else disk)",
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="floating-point type")
    mixed_precision: Literal["off", "bfloat16"] = Field(
        "off",
        description="type of matrix products and convolutions in training, if the device supports it",
    )
    eval_every: Count = Field(1, description="rounds between evaluations; the last round is always evaluated")
    eval_clients: Annotated[int, Field(ge=1, le=MAX_CLIENTS)] | None = Field(
        None,
        description="number of clients to evaluate, drawn once (default: all; above 10,000 clients, 1,000)",
    )

    early_stopping: EarlyStopping = Field(
        "loss",
        description="what chooses the round of each client's judged model: validation loss or accuracy; off: the last "
        "round",
    )

    dp_delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = Field(
        1e-5, description="with differential privacy: probability delta with which epsilon may be exceeded"
    )

    dp_client: Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="differential privacy of whole clients: epsilon of all uploads of a run together (default: off)",
    )
    dp_client_noise: Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="the same, by the noise multiplier instead of epsilon: deviation of the noise over dp_client_clip",
    )
    dp_client_clip: Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)] = Field(
        1.0, description="with dp_client or dp_client_noise: norm to which each client's update is clipped"
    )
    dp_client_where: Literal["central", "local"] = Field(
        "central",
        description="with dp_client or dp_client_noise: who adds the noise: the server, which is trusted then, or each "
        "client",
    )

    dp_record: Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="differential privacy of every training row against whoever sees models: epsilon that no client "
        "exceeds in the whole run (default: off)",
    )
    dp_record_noise: Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None, description="the same, by its noise multiplier, the same for all clients, instead of epsilon"
    )
    dp_record_clip: Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)] = Field(
        1.0, description="with dp_record or dp_record_noise: norm to which each row's gradient is clipped"
    )

    attack: str | None = Field(
        None,
        description="what attackers do in this simulation: NAME, or NAME:NUMBER for its strength (default: no attack)",
    )
    attackers: int | float | None = Field(
        None, description="clients that attack: a whole number, or a share of all clients (default: 0.2)"
    )
    accept: Literal["always", "better"] = Field(
        "always",
        description="what clients accept: every received model, or only one that is no worse on their validation rows",
    )

    screening: Literal["auto", "on", "groups", "off"] = Field(
        "auto",
        description="refuse uploads that no honest client sends (groups), and clients who contradict the others (on); "
        "auto is on where a client may be malicious: in deployments and under attack",
    )
    max_weight: Annotated[float, Field(ge=1, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="largest ratio of a client's sample count to the median of all clients; more is cut (default: "
        "3 for counts that clients claim, in deployments and under attack; none for counts that are known)",
    )
    upload_steps: str | None = Field(
        None,
        description="custom steps between the uploads and the aggregation, with commas between: file.py:step",
    )
    compress: str | None = Field(
        None,
        description="compress uploads, with error feedback: int8, or topk:SHARE for a share of the values (default: "
        "off)",
    )
    robust: str = Field(
        "off",
        description="robust aggregation: median, trimmed_mean, geometric_median, multi_krum, trust or file.py:rule "
        "replace an average; rows limits each client's mixture to models that are near to its own",
    )
    robust_share: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = Field(
        0.2,
        description="share of malicious uploads: trimmed_mean cuts it at each end, multi_krum leaves it out",
    )
    trusted: str | None = Field(
        None,
        description="with robust trust: names of the clients whose updates are the reference, with commas between",
    )
    max_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        None, description="largest share of any one other client in a client's mixture (default: no limit)"
    )

    @field_validator("screening", "robust", "early_stopping", "mixed_precision", mode="before")
    @classmethod
    def _on_or_off(cls, value: object) -> object:
        """Read a boolean as on or off: YAML makes booleans of these words."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("cohort", "attackers", mode="before")
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

    @field_validator("cohort", "attackers")
    @classmethod
    def _some_or_all(cls, value: int | float | None) -> int | float | None:
        if value is not None and not (
            1 <= value <= MAX_CLIENTS if isinstance(value, int) else 0 < value <= 1
        ):
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

    @field_validator("dp_client_noise")
    @classmethod
    def _one_noise(cls, noise: float | None, info: ValidationInfo) -> float | None:
        if noise is not None and info.data.get("dp_client") is not None:
            raise ValueError(f"give dp_client ({info.data['dp_client']:g}) or dp_client_noise, not both")
        return noise

    @field_validator("dp_client_clip", "dp_client_where")
    @classmethod
    def _needs_client_privacy(cls, value: object, info: ValidationInfo) -> object:
        if value != cls.model_fields[info.field_name or ""].default and all(
            info.data.get(key) is None for key in ("dp_client", "dp_client_noise")
        ):
            raise ValueError("it needs dp_client, an epsilon, or dp_client_noise; add one")
        return value

    @field_validator("dp_record_noise")
    @classmethod
    def _one_record_noise(cls, noise: float | None, info: ValidationInfo) -> float | None:
        if noise is not None and info.data.get("dp_record") is not None:
            raise ValueError(f"give dp_record ({info.data['dp_record']:g}) or dp_record_noise, not both")
        return noise

    @field_validator("dp_record_clip")
    @classmethod
    def _needs_record_privacy(cls, clip: float, info: ValidationInfo) -> float:
        is_default = clip == cls.model_fields["dp_record_clip"].default
        if not is_default and all(info.data.get(key) is None for key in ("dp_record", "dp_record_noise")):
            raise ValueError("it needs dp_record, an epsilon, or dp_record_noise; add one")
        return clip

    @field_validator("attackers")
    @classmethod
    def _needs_attack(cls, value: int | float | None, info: ValidationInfo) -> int | float | None:
        if value is not None and "attack" in info.data and info.data["attack"] is None:
            raise ValueError("it needs an attack; add one, such as negated_model")
        return value

    @field_validator("trusted")
    @classmethod
    def _needs_trust(cls, names: str | None, info: ValidationInfo) -> str | None:
        if names and info.data.get("robust", "trust") != "trust":
            raise ValueError(f"it needs robust trust, and robust is {info.data['robust']}")
        return names

    @field_validator("ray_address")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is None or address in {"auto", "local"} or re.fullmatch(r"[^\s:/]+:\d{1,5}", address):
            return address
        raise ValueError(
            "expected HOST:PORT of a Ray cluster that this machine is part of, such as 192.0.2.7:6379, or auto"
        )

    @field_validator("ray_address", "ray_actors", "ray_gpus")
    @classmethod
    def _needs_ray(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("engine", "ray") != "ray":
            raise ValueError(f"it needs engine ray, and the engine is {info.data['engine']}")
        return value

    @classmethod
    def from_keywords(cls, **values: Any) -> Self:
        """Return settings from keywords.

        Raises:
            ConfigError: some settings are unknown or some values impossible; one message names all of them.

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
        """Local steps per round; None if the settings give epochs."""
        return None if self.epochs else self.steps or 20

    @property
    def is_client_private(self) -> bool:
        """True if whole clients are protected by differential privacy."""
        return self.dp_client is not None or self.dp_client_noise is not None

    @property
    def is_record_private(self) -> bool:
        """True if training rows are protected by differential privacy."""
        return self.dp_record is not None or self.dp_record_noise is not None

    def count_local_steps(self, samples: float) -> int:
        """Count the local steps of a whole run, for a client with so many training samples in every cohort."""
        return self.rounds * (self.local_steps or (self.epochs or 1) * ceil(samples / self.batch_size))

    def cohort_size(self, n_clients: int) -> int:
        """Return the size of a cohort of `n_clients`; a fraction is rounded to at least one client.

        Raises:
            ConfigError: the cohort is larger than the federation.

        """
        if isinstance(self.cohort, int):
            if self.cohort > n_clients:
                raise ConfigError(
                    f"cohort: got {self.cohort} clients per round, expected at most the {n_clients} clients of the "
                    "federation, "
                    "or a fraction such as 0.5"
                )
            return self.cohort
        return max(1, round(self.cohort * n_clients))


RAY_DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in Settings.model_fields.items() if name.startswith("ray_")
}
"""Settings that need engine ray, and their defaults."""
