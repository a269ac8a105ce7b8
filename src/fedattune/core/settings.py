"""Define the settings of a training run: one schema for Python, YAML files and the command line."""

import re
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, Unpack, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .errors import ConfigError, did_you_mean
from .groups import FlatSchema, Group, Owners
from .options import Count, describe_errors
from .own_code import is_reference, make_absolute

MAX_CLIENTS = 10_000_000
SEED_LIMIT = 2**32
"""Seeds are smaller: NumPy's legacy generator takes no others."""
MAX_FLOAT32 = 1e38
MAX_COUNT = 1_000_000
N_EVALUATIONS = 25
"""Minimum number of evaluations of a long run by default: enough for a curve. More may take as long as training."""
LARGEST_UPDATE = 5.0
"""Ratio of an update's norm to the usual norm, above which it is rejected, unless a deployment says another."""
Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]
OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleKind = Literal["constant", "cosine", "step"]
ADAM_RATE = 1e-3
"""Default learning rate of Adam and AdamW, that of `torch.optim`."""
EngineName = Literal["auto", "sequential", "vectorized", "ray"]
Augmentation = Literal["crop", "flip"]
AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
EarlyStopping = Literal["loss", "accuracy", "off"]
PositiveFloat32 = Annotated[float, Field(gt=0, le=MAX_FLOAT32, allow_inf_nan=False)]
NonNegativeFloat32 = Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)]


def _read_on_or_off(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _read_number(value: object) -> object:
    if isinstance(value, str):
        try:
            return float(value) if {".", "e"} & set(value.lower()) else int(value)
        except ValueError:
            raise ValueError("expected a number of clients such as 10, or a fraction such as 0.5") from None
    return value


def _check_number(value: float) -> float:
    if not (1 <= value <= MAX_CLIENTS if isinstance(value, int) else 0 < value <= 1):
        raise ValueError(f"expected a number of clients from 1 to {MAX_CLIENTS:,}, or a fraction between 0 and 1")
    return value


OnOrOff = BeforeValidator(_read_on_or_off)
"""Reads a boolean as on or off: YAML makes booleans of these words."""
NumberOrFraction = Annotated[int | float, BeforeValidator(_read_number), AfterValidator(_check_number)]
"""A number of clients, or a share of all clients; reads "10" as ten clients and "0.5" or "1.0" as a share."""


class Training(Group):
    """Options of local training."""

    owners: ClassVar[Owners] = {
        "momentum": ("optimizer", ("sgd",)),
        **dict.fromkeys(("beta1", "beta2", "eps"), ("optimizer", ("adam", "adamw"))),
        **dict.fromkeys(("lr_step_size", "lr_gamma"), ("lr_schedule", ("step",))),
    }

    steps: Count | None = Field(
        None, description="local mini-batch steps per round (default: 20; for a table, one epoch instead)"
    )
    epochs: Count | None = Field(None, description="local epochs per round, instead of steps")
    batch_size: Count = Field(20, description="samples in a mini-batch")
    lr: PositiveFloat32 = Field(0.02, description="local learning rate (default: 0.02; with adam and adamw, 0.001)")
    optimizer: OptimizerName = Field(
        "sgd",
        description="optimizer of the local steps, of methods whose clients run SGD (default: sgd; for a "
        "pretrained network, adamw)",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="with optimizer sgd: momentum")
    nesterov: bool = Field(False, description="with momentum: Nesterov's")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="with optimizer adam or adamw: decay of the first moment"
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="with optimizer adam or adamw: decay of the second moment"
    )
    eps: PositiveFloat32 = Field(1e-8, description="with optimizer adam or adamw: addend of the denominator")
    optimizer_state: Literal["restart", "keep"] = Field(
        "restart", description="momentum and moments: restarted in every round, or kept by each client"
    )
    max_grad_norm: PositiveFloat32 | None = Field(
        None, description="norm to which the gradient of each mini-batch is clipped (default: no limit)"
    )
    lr_schedule: ScheduleKind = Field(
        "constant", description="learning rate over the rounds: constant, a cosine that falls to zero, or steps down"
    )
    lr_warmup: Annotated[int, Field(ge=0, le=MAX_COUNT)] = Field(
        0, description="first rounds, in which the learning rate rises linearly"
    )
    lr_step_size: Count | None = Field(
        None, description="with lr_schedule step: rounds between two steps (default: a third of the rounds)"
    )
    lr_gamma: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="with lr_schedule step: factor of each step")
    weight_decay: NonNegativeFloat32 | None = Field(
        None,
        description="l2 coefficient of every gradient, and of adamw's decay beside it, the same for all methods "
        "(default: the method's; for adamw, 0.01)",
    )
    bn_affine: Literal["average", "local"] = Field(
        "average", description="scale and shift of BatchNorm layers: averaged, or kept by each client"
    )
    bn_buffers: Literal["local", "average"] = Field(
        "local", description="running statistics of BatchNorm layers: kept by each client, or averaged"
    )
    augment: Annotated[str, OnOrOff] = Field(
        "off",
        description="random changes of images in training: crop (of the image within 4 pixels of black), flip (left "
        "to right, every second image), or crop,flip",
    )

    @field_validator("augment")
    @classmethod
    def _name_augmentations(cls, text: str) -> str:
        names = {name.strip() for name in text.split(",")}
        if names != {"off"} and not names <= {*AUGMENTATIONS}:
            raise ValueError("expected off, crop, flip or crop,flip")
        return ",".join(sorted(names))

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """The changes that `augment` names."""
        return tuple(name for name in AUGMENTATIONS if name in self.augment.split(","))

    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and not info.data.get("momentum", 1):
            raise ValueError("it needs momentum")
        return nesterov

    @model_validator(mode="after")
    def _choose_rate(self) -> Self:
        if self.optimizer != "sgd" and "lr" not in self.model_fields_set:
            self.__dict__["lr"] = ADAM_RATE  # the model is frozen, and the rate is a default
        return self

    @field_validator("epochs")
    @classmethod
    def _one_unit(cls, epochs: int | None, info: ValidationInfo) -> int | None:
        if epochs and info.data.get("steps"):
            raise ValueError(f"give steps ({info.data['steps']}) or epochs, not both")
        return epochs

    @property
    def local_steps(self) -> int | None:
        """Local steps per round; None if the settings give epochs."""
        return None if self.epochs else self.steps or 20

    def count_steps(self, samples: float) -> int:
        """Count the steps of one round, for a client with so many training samples."""
        return self.local_steps or (self.epochs or 1) * ceil(samples / self.batch_size)


BALANCED = "balanced"
"""The class weights that follow from each client's training rows."""
LOSSES = ("auto", "focal", "absolute", "huber")
"""Names of the losses of local training."""


def read_class_weights(text: str) -> list[float] | dict[str, float]:
    """Read "0.2,1,3" as one weight per class, and "low=0.2,high=3" as weights by the names of classes."""
    parts = list[str]()
    for piece in text.split(","):
        if parts and "=" in text and "=" not in parts[-1]:  # a comma in the name of a class
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    names = [part.rpartition("=")[0].strip() for part in parts]
    try:
        weights = [float(part.rpartition("=")[2]) for part in parts]
    except ValueError:
        weights = [0.0]
    if not all(0 < weight <= MAX_FLOAT32 for weight in weights) or (any(names) and not all(names)):
        raise ValueError(
            f"expected {BALANCED}, one number above 0 per class such as 0.2,1,3, or weights by name such as a=0.2,b=1"
        )
    return dict(zip(names, weights, strict=True)) if any(names) else weights


ClassWeights = str | Sequence[float] | Mapping[str, float]


def _write_class_weights(value: object) -> object:
    value = getattr(value, "tolist", lambda: value)()  # of a tensor or an array
    if isinstance(value, Mapping):
        return ",".join(f"{name}={weight}" for name, weight in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


class LossOptions(Group):
    """Options of the loss that clients train on."""

    owners: ClassVar[Owners] = {
        "focal_gamma": ("name", ("focal",)),
        "huber_delta": ("name", ("huber",)),
        "label_smoothing": ("name", ("auto",)),
    }

    name: str = Field(
        "auto",
        alias="loss",
        description="loss of local training: auto (cross-entropy of classes, squared error of numbers), focal, "
        "absolute, huber, or file.py:loss; models are evaluated by auto, always",
    )
    focal_gamma: NonNegativeFloat32 = Field(2.0, description="with loss focal: exponent gamma; 0 is the cross-entropy")
    huber_delta: PositiveFloat32 = Field(
        1.0, description="with loss huber: error above which the loss is linear, in standard deviations of the target"
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of every label that is spread over all classes, in training"
    )
    class_weights: Annotated[
        str | None, BeforeValidator(_write_class_weights, json_schema_input_type=ClassWeights | None)
    ] = Field(
        None,
        description="weights of classes in the training loss: balanced, by each client's own training rows; or "
        "0.2,1,3, or name=weight with commas between (default: none)",
    )

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in LOSSES and not is_reference(name):
            raise ValueError(f"expected {', '.join(LOSSES)}, or a custom loss as file.py:loss")
        return make_absolute(name)

    @field_validator("class_weights")
    @classmethod
    def _are_weights(cls, text: str | None) -> str | None:
        if text not in (None, BALANCED):
            read_class_weights(text)
        return text

    @property
    def corrections(self) -> dict[str, float | str]:
        """The options that change how classes count, by name, if they are on."""
        values = {"label_smoothing": self.label_smoothing, "class_weights": self.class_weights}
        return {name: value for name, value in values.items() if value}


class Participation(Group):
    """Options of cohorts, drop-outs and newcomers."""

    cohort: NumberOrFraction = Field(
        1.0, description="clients per round: a whole number, or a fraction of all clients (1.0 = all)"
    )
    train: Literal["method", "cohort", "all"] = Field(
        "method", description="clients that train in each round: as the method says, only the cohort, or all"
    )
    drop_out: float = Field(
        0.0, ge=0, lt=1, description="probability that a client of the cohort drops out before it uploads"
    )
    held_out: Annotated[int, Field(ge=0, le=MAX_CLIENTS)] = Field(
        0, description="clients that join only after training"
    )
    join_rounds: Count = Field(5, description="rounds for clients that join after training")

    def cohort_size(self, n_clients: int) -> int:
        """Return the size of a cohort of `n_clients`; a fraction is rounded to at least one client."""
        if isinstance(self.cohort, int):
            if self.cohort > n_clients:
                raise ConfigError(
                    f"cohort: got {self.cohort} clients per round, expected at most the {n_clients} clients of the "
                    "federation, or a fraction such as 0.5"
                )
            return self.cohort
        return max(1, round(self.cohort * n_clients))


class Evaluation(Group):
    """Options of evaluation and early stopping."""

    every: Count | None = Field(
        None,
        alias="eval_every",
        description="rounds between evaluations; the last round is always evaluated (default: rounds / "
        f"{N_EVALUATIONS}, at least 1)",
    )
    clients: Annotated[int, Field(ge=1, le=MAX_CLIENTS)] | None = Field(
        None,
        alias="eval_clients",
        description="number of clients to evaluate, drawn once (default: all; above 10,000 clients, 1,000)",
    )
    early_stopping: Annotated[EarlyStopping, OnOrOff] = Field(
        "loss",
        description="what chooses the round of each client's judged model: validation loss or accuracy; off: the last "
        "round",
    )


class Ray(Group):
    """Options of engine ray."""

    needs = "engine ray"

    address: str | None = Field(
        None,
        alias="ray_address",
        description="with engine ray: HOST:PORT of a running cluster, or auto for the cluster of this machine "
        "(default: this machine alone)",
    )
    actors: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = Field(
        None,
        alias="ray_actors",
        description="with engine ray: actors that hold the clients (default: one per core or share of a GPU)",
    )
    gpus: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        0.0, alias="ray_gpus", description="with engine ray: share of a GPU that each actor takes"
    )

    @classmethod
    def is_on(cls, flat: Mapping[str, Any]) -> bool:
        """Tell whether the engine is Ray."""
        return flat.get("engine") == "ray"

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is None or address in {"auto", "local"} or re.fullmatch(r"[^\s:/]+:\d{1,5}", address):
            return address
        raise ValueError(
            "expected HOST:PORT of a Ray cluster that this machine is part of, such as 192.0.2.7:6379, or auto"
        )


class Execution(Group):
    """Options of engine, device and precision."""

    engine: EngineName = Field(
        "auto",
        description="how clients run: one at a time (sequential), all of a round as one batch (vectorized), or on Ray",
    )
    ray: Ray | None = None
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of the tensors")
    client_state: Literal["auto", "memory", "disk"] = Field(
        "auto", description="storage of the clients' tensors: memory, disk, or auto (memory up to 1 GiB, else disk)"
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="floating-point type")
    mixed_precision: Annotated[Literal["off", "bfloat16"], OnOrOff] = Field(
        "off", description="type of matrix products and convolutions in training, if the device supports it"
    )


class NoiseOptions(Group):
    """Noise that is given by `epsilon` or by `noise`."""

    @field_validator("noise", check_fields=False)
    @classmethod
    def _one_noise(cls, noise: float | None, info: ValidationInfo) -> float | None:
        if noise is not None and info.data.get("epsilon") is not None:
            raise ValueError(f"give {cls.switches[0]} ({info.data['epsilon']:g}) or {cls.switches[1]}, not both")
        return noise


class ClientNoiseOptions(NoiseOptions):
    """Differential privacy of whole clients: the noise is given by `epsilon` or by `noise`."""

    switches = ("dp_client", "dp_client_noise")
    needs = "dp_client, an epsilon, or dp_client_noise; add one"

    epsilon: PositiveFloat32 | None = Field(
        None,
        alias="dp_client",
        description="differential privacy of whole clients: epsilon of all uploads of a run together (default: off)",
    )
    noise: NonNegativeFloat32 | None = Field(
        None,
        alias="dp_client_noise",
        description="the same, by the noise multiplier instead of epsilon: deviation of the noise over dp_client_clip",
    )
    clip: PositiveFloat32 = Field(
        1.0,
        alias="dp_client_clip",
        description="with dp_client or dp_client_noise: norm to which each client's update is clipped",
    )
    where: Literal["central", "local"] = Field(
        "central",
        alias="dp_client_where",
        description="with dp_client or dp_client_noise: who adds the noise: the server, which is trusted then, or each "
        "client",
    )


class RecordNoiseOptions(NoiseOptions):
    """Differential privacy of training rows: the noise is given by `epsilon` or by `noise`."""

    switches = ("dp_record", "dp_record_noise")
    needs = "dp_record, an epsilon, or dp_record_noise; add one"

    epsilon: PositiveFloat32 | None = Field(
        None,
        alias="dp_record",
        description="differential privacy of every training row against whoever sees models: epsilon that no client "
        "exceeds in the whole run (default: off)",
    )
    noise: NonNegativeFloat32 | None = Field(
        None,
        alias="dp_record_noise",
        description="the same, by its noise multiplier, the same for all clients, instead of epsilon",
    )
    clip: PositiveFloat32 = Field(
        1.0,
        alias="dp_record_clip",
        description="with dp_record or dp_record_noise: norm to which each row's gradient is clipped",
    )


class Privacy(Group):
    """Differential privacy."""

    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = Field(
        1e-5,
        alias="dp_delta",
        description="with differential privacy: probability delta with which epsilon may be exceeded",
    )
    client: ClientNoiseOptions | None = None
    record: RecordNoiseOptions | None = None


class Attack(Group):
    """A simulated attack."""

    switches = ("attack",)
    needs = "an attack; add one, such as negated_model"

    name: str = Field(
        alias="attack",
        description="what attackers do in this simulation: NAME, or NAME:NUMBER for its strength (default: no attack)",
    )
    attackers: NumberOrFraction | None = Field(
        None, description="clients that attack: a whole number, or a share of all clients (default: 0.2)"
    )


class Uploads(Group):
    """Options of uploads, beside attack, noise and defence."""

    compress: str | None = Field(
        None,
        description="compress uploads, with error feedback: int8, or topk:SHARE for a share of the values (default: "
        "off)",
    )
    steps: str | None = Field(
        None,
        alias="upload_steps",
        description="custom steps between the uploads and the aggregation, with commas between: file.py:step",
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _are_named(cls, steps: object) -> object:
        if steps is not None and not isinstance(steps, str):
            raise ValueError('expected "file.py:Step", or several with commas between')
        return steps


class Robust(Group):
    """Options of robust aggregation."""

    needs = "robust, a rule such as median or trust; add it"

    rule: Annotated[str, OnOrOff] = Field(
        "off",
        alias="robust",
        description="robust aggregation: median, trimmed_mean, geometric_median, multi_krum, trust or file.py:rule "
        "replace an average; rows limits each client's mixture to models that are near to its own",
    )
    share: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)] = Field(
        0.2,
        alias="robust_share",
        description="with robust: share of malicious uploads: trimmed_mean cuts it at each end, multi_krum leaves it "
        "out",
    )
    trusted: str | None = Field(
        None, description="with robust trust: names of the clients whose updates are the reference, with commas between"
    )

    @classmethod
    def is_on(cls, flat: Mapping[str, Any]) -> bool:
        """Tell whether there is a rule."""
        return bool(flat.get("robust", "off") != "off")

    @field_validator("trusted")
    @classmethod
    def _needs_trust(cls, names: str | None, info: ValidationInfo) -> str | None:
        if names and info.data.get("rule", "trust") != "trust":
            raise ValueError(f"it needs robust trust, and robust is {info.data['rule']}")
        return names


class Defence(Group):
    """Options that protect the server and the clients from faulty and malicious uploads."""

    accept: Literal["auto", "always", "harmless", "better"] = Field(
        "auto",
        description="what clients accept: every received model (always), one that is not clearly worse than what they "
        "knew (harmless), or only one that is no worse on their validation rows than their own (better); auto is "
        "harmless where a client may be malicious: in deployments and under attack",
    )
    screening: Annotated[Literal["auto", "on", "groups", "off"], OnOrOff] = Field(
        "auto",
        description="reject uploads that no honest client sends (groups), and clients who contradict the others (on); "
        "auto is groups where a client may be malicious: in deployments and under attack; else off",
    )
    max_weight: Annotated[float, Field(ge=1, le=MAX_FLOAT32, allow_inf_nan=False)] | None = Field(
        None,
        description="largest ratio of a client's sample count to the median of all clients; more is cut (default: "
        "3 for counts that clients claim, in deployments and under attack; none for counts that are known)",
    )
    robust: Robust | None = None
    max_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        None, description="largest share of any one other client in a client's mixture (default: no limit)"
    )

    @property
    def clip_rows(self) -> bool:
        """Tell whether clients' mixtures are limited to models near their own."""
        return self.robust_rule == "rows"

    @property
    def robust_rule(self) -> str:
        """Name of the robust rule; off without one."""
        return self.robust.rule if self.robust else "off"


class SettingsKeywords(TypedDict, total=False):
    """The flat names and types of `Settings`, for editors and type checkers; the groups describe them."""

    rounds: int
    seed: int
    steps: int | None
    epochs: int | None
    batch_size: int
    lr: float
    optimizer: OptimizerName
    momentum: float
    nesterov: bool
    beta1: float
    beta2: float
    eps: float
    optimizer_state: Literal["restart", "keep"]
    max_grad_norm: float | None
    lr_schedule: ScheduleKind
    lr_warmup: int
    lr_step_size: int | None
    lr_gamma: float
    weight_decay: float | None
    bn_affine: Literal["average", "local"]
    bn_buffers: Literal["local", "average"]
    augment: str
    loss: str
    focal_gamma: float
    huber_delta: float
    label_smoothing: float
    class_weights: ClassWeights | None
    cohort: int | float
    train: Literal["method", "cohort", "all"]
    drop_out: float
    held_out: int
    join_rounds: int
    eval_every: int | None
    eval_clients: int | None
    early_stopping: EarlyStopping
    engine: EngineName
    ray_address: str | None
    ray_actors: int | None
    ray_gpus: float
    device: Literal["auto", "cpu", "cuda"]
    client_state: Literal["auto", "memory", "disk"]
    dtype: Literal["float32", "float64"]
    mixed_precision: Literal["off", "bfloat16"]
    dp_delta: float
    dp_client: float | None
    dp_client_noise: float | None
    dp_client_clip: float
    dp_client_where: Literal["central", "local"]
    dp_record: float | None
    dp_record_noise: float | None
    dp_record_clip: float
    attack: str | None
    attackers: int | float | None
    compress: str | None
    upload_steps: str | None
    accept: Literal["auto", "always", "harmless", "better"]
    screening: Literal["auto", "on", "groups", "off"]
    max_weight: float | None
    robust: str
    robust_share: float
    trusted: str | None
    max_share: float | None


class Settings(FlatSchema):
    """Settings of a run: everything except the data, the model and the method.

    Examples:
        >>> settings = Settings(rounds=20, lr=0.05, cohort=0.5)
        >>> settings.rounds, settings.training.lr, settings.participation.cohort_size(10)
        (20, 0.05, 5)
        >>> settings.privacy.client is None, settings.to_keywords(exclude_defaults=True)
        (True, {'rounds': 20, 'lr': 0.05, 'cohort': 0.5})
        >>> Settings.from_keywords(round=20)
        Traceback (most recent call last):
        ...
        fedattune.core.errors.ConfigError: unknown setting 'round'; did you mean 'rounds'? (known: ...)
    """

    rounds: Count = Field(50, description="communication rounds")
    seed: Seed = Field(0, description="seed of initial model, cohorts and batches")
    training: Training = Training()
    loss: LossOptions = LossOptions()
    participation: Participation = Participation()
    evaluation: Evaluation = Evaluation()
    execution: Execution = Execution()
    privacy: Privacy = Privacy()
    attack: Attack | None = None
    uploads: Uploads = Uploads()
    defence: Defence = Defence()

    def __init__(self, **flat: Unpack[SettingsKeywords]) -> None:
        super().__init__(**flat)

    @property
    def eval_every(self) -> int:
        """Rounds between evaluations."""
        return self.evaluation.every or max(1, self.rounds // N_EVALUATIONS)

    def is_evaluated(self, r: int) -> bool:
        """Tell whether the models of round r are evaluated."""
        return r == self.rounds or r % self.eval_every == 0

    def to_config(self) -> dict[str, Any]:
        """Return the flat options of a run, with the interval between its evaluations."""
        return self.to_keywords() | {"eval_every": self.eval_every}

    @classmethod
    def from_keywords(cls, others: Collection[str] = (), /, **values: Any) -> Self:
        """Return settings from keywords; one ConfigError names all that are unknown or impossible.

        `others` are further keywords of the calling function, which the error may suggest.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            known = {*cls.flat_fields(), *others}
            phrases = describe_errors(error, unknown=lambda key: f"unknown setting {key!r}; {did_you_mean(key, known)}")
            raise ConfigError("; ".join(phrases)) from error


RAY_DEFAULTS: dict[str, Any] = {info.alias or name: info.default for name, info in Ray.model_fields.items()}
"""Settings that need engine ray, and their defaults."""
ROBUST_DEFAULTS: dict[str, Any] = {info.alias or name: info.default for name, info in Robust.model_fields.items()}
"""Settings of robust aggregation, and their defaults: no rule."""

UNDISTURBED: dict[str, Any] = {
    "cohort": 1.0, "drop_out": 0.0, "held_out": 0, "eval_clients": None, "attack": None, "attackers": None,
}  # fmt: skip
"""Settings with which all clients of a federation train, all are evaluated, and none is malicious."""

SIMULATION_SETTINGS = {
    *RAY_DEFAULTS, "attack", "attackers", "held_out", "join_rounds", "engine", "client_state", "early_stopping",
    "upload_steps",
}  # fmt: skip
"""Settings that only a simulation has."""
