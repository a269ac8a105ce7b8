"""The typed settings of a training run; the one schema behind Python, YAML files and the command line."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import ConfigError, did_you_mean


class Settings(BaseModel):
    """How one algorithm is trained on one federation: everything but the data, the model and the method."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    rounds: Annotated[int, Field(ge=1)] = Field(50, description="communication rounds")
    cohort: int | float = Field(
        1.0, description="clients asked per round: a whole number, or a fraction of all (1.0 = everybody)"
    )
    train: Literal["method", "cohort", "all"] = Field(
        "method", description="who trains each round: as the method says, only the cohort, or all clients"
    )
    steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="local mini-batch steps per round (20 if neither steps nor epochs is given)"
    )
    epochs: Annotated[int, Field(ge=1)] | None = Field(
        None, description="local epochs per round, instead of steps"
    )
    batch_size: Annotated[int, Field(ge=1)] = Field(20, description="samples in a mini-batch")
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(0.02, description="local learning rate")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None,
        description="l2 coefficient added to every gradient, of every method alike (default: the method's)",
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of initial model, cohorts and batches")
    engine: Literal["auto", "loop", "batched"] = Field(
        "auto", description="one client at a time, or all clients of a round as one batch of models"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where tensors live")
    dtype: Literal["float32", "float64"] = Field("float32", description="floating-point type")
    eval_every: Annotated[int, Field(ge=1)] = Field(
        1, description="evaluate all clients every so many rounds (and after the last one)"
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

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        if isinstance(self.cohort, bool) or not (
            self.cohort >= 1 if isinstance(self.cohort, int) else 0 < self.cohort <= 1
        ):
            raise ValueError(
                f"cohort must be a number of clients (1 or more) or a fraction between 0 and 1, got {self.cohort}"
            )
        if self.steps and self.epochs:
            raise ValueError(f"give steps ({self.steps}) or epochs ({self.epochs}), not both")
        return self

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Settings from keywords.

        Raises:
            ConfigError: unknown settings or impossible values, all of them in one message.

        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls.model_fields)) from error

    @property
    def local_steps(self) -> int | None:
        """Local steps per round; None when epochs are given."""
        return None if self.epochs else self.steps or 20

    def cohort_size(self, n_clients: int) -> int:
        """Clients asked per round, of `n_clients`; a fraction is rounded, at least one client."""
        if isinstance(self.cohort, int):
            return self.cohort
        return max(1, round(self.cohort * n_clients))


def explain(error: ValidationError, known: Iterable[str]) -> str:
    """Every mistake in one sentence each: what was got, what was expected, and the near key for an unknown one."""
    sentences = []
    for e in error.errors():
        where = ".".join(str(part) for part in e["loc"])
        if e["type"] == "extra_forbidden":
            sentences.append(f"unknown setting {where!r}; {did_you_mean(where, known)}")
        else:
            message = e["msg"].removeprefix("Value error, ")
            got = f", got {e['input']!r}" if where else ""
            sentences.append(f"{where}: {message[0].lower()}{message[1:]}{got}" if where else message)
    return "; ".join(dict.fromkeys(sentences))
