"""What a deployed run is told, read from the flat values that Flower carries."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..checked import explain
from ..cli.choices import assign, spelled_out
from ..config import Settings
from ..core import Algorithm
from ..data import Schema
from ..deployment import LEFT_TO_NODES, SIMULATED, Deployment
from ..errors import ConfigError, near
from ..experiment import Experiment, parse_set
from ..registry import build, lookup, options

Scalar = str | int | float | bool


class Plan:
    """A run configuration, read: `experiment` and `deployment`, and the methods with their options.

    `own` are methods of the user's own by name, in addition to those that FedAttune knows.

    Raises:
        ConfigError: unknown keys or impossible values, all of them in one message.

    """

    def __init__(self, run_config: Mapping[str, Scalar], own: Mapping[str, Algorithm] | None = None) -> None:
        problems: list[str] = []
        mine: dict[str, Any] = {}
        values: dict[str, Any] = {}
        known = (Experiment.model_fields.keys() - LEFT_TO_NODES - SIMULATED) | Deployment.model_fields.keys()
        for key, value in run_config.items():
            name = {"algorithm": "algorithms"}.get(key, key.replace("-", "_"))
            if name in mine or name in values:
                problems.append(f"{name} is given twice, once as {key!r}")
            elif name not in known:
                hint = near(name, known)
                problems.append(f"unknown key {key!r}{', ' if hint else ''}{hint}")
            else:
                (mine if name in Deployment.model_fields else values)[name] = value
        if isinstance(values.get("set"), str):
            values["set"] = parse_set(item for item in values["set"].split(";") if item.strip())
        if isinstance(mine.get("data_schema"), str):
            mine["data_schema"] = Schema.from_json(mine["data_schema"]) if mine["data_schema"] else None
        found: dict[str, Any] = {}
        for schema, given in ((Experiment, values), (Deployment, mine)):
            try:
                found[schema.__name__] = schema(**given)
            except ValidationError as error:
                problems += explain(error, lambda key: key.replace("_", "-"))
        if problems:
            raise ConfigError("run configuration: " + "; ".join(problems))
        self.experiment: Experiment = found["Experiment"]
        self.deployment: Deployment = found["Deployment"]
        self._own = dict(own or {})
        self._choose()

    def _choose(self) -> None:
        from ..algorithms import ALGORITHMS
        from ..cli.plan import _model_options

        names = spelled_out(self.experiment.algorithms, ALGORITHMS | self._own)
        factories = {name: lookup("algorithm", name, ALGORITHMS) for name in names if name not in self._own}
        known = {
            "algorithm": {name: [o.name for o in options(make)] for name, make in factories.items()},
            "model": {self.experiment.model: _model_options(self.experiment.model)},
        }
        chosen = assign(self.experiment.set, known)
        self.options = {name: chosen["algorithm"].get(name, {}) for name in names}
        self.model_options = chosen["model"][self.experiment.model]
        self.algorithms = {
            name: self._own[name] if name in self._own else build(name, factories[name], self.options[name])
            for name in names
        }

    def settings(self, seed: int) -> Settings:
        """The training settings of the run with a seed."""
        return self.experiment.settings(seed)

    @property
    def seeds(self) -> range:
        """The seeds of the runs of each method."""
        return range(self.experiment.seed, self.experiment.seed + self.experiment.seeds)

    def card(self, name: str, seed: int, shape: tuple[int, ...], classes: tuple[str, ...]) -> dict[str, Any]:
        """What is needed to build the model of a run: see `personal_models`."""
        return {
            "model": self.experiment.model,
            "model_options": dict(self.model_options),
            "algorithm": name,
            "options": dict(self.options[name]),
            "seed": seed,
            "input_shape": list(shape),
            "classes": list(classes),
        }
