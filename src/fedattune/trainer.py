"""`fit`: train one algorithm on a federation."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .algorithms import ALGORITHMS
from .cohorts import check_device, held_out
from .config import Settings
from .core import Algorithm
from .data import Federation
from .errors import ConfigError
from .joining import Remains, join, sample
from .models import check_model, make_model
from .personal_models import wrapped
from .registry import build, lookup
from .result import Result
from .rounds import Progress, Run
from .runs.folder import RunFolder

__all__ = ["Progress", "fit"]


def fit(
    algorithm: Algorithm | str,
    federation: Federation,
    model: str | nn.Module = "mlr",
    *,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    settings: Settings | None = None,
    **more: Any,
) -> Result:
    """Train one algorithm on a federation and return what every client reaches.

    Args:
        algorithm: an `Algorithm`, or the name of one with its `options`.
        federation: the clients' data.
        model: an `nn.Module` (its weights are every client's initial model), the name of a model with its
            `model_options`, or "package.module:factory".
        name: what the run is called; by default the algorithm's name.
        options: the algorithm's options, when it is given by name.
        model_options: the model's options, when it is given by name.
        out: run folder, new or empty; without it nothing is written and the run cannot be resumed.
        resume: go on in `out`; a finished run is returned as it is.
        watch: called after every round.
        stop: asked after every round; when it says yes, the run is saved and returned unfinished.
        settings: rounds, learning rate and so on; single ones can be given by keyword instead: `rounds=100`.
        more: single settings.

    Raises:
        ConfigError: unknown names or options, impossible values.
        ModelError: the model does not fit the data.
        RunError: `out` is in use or belongs to another run, or training diverged on every client.

    """
    if not isinstance(federation, Federation):
        raise ConfigError(
            f"fit needs a Federation, got {type(federation).__name__}; make one with fedattune.federation(clients)"
        )
    settings = Settings.checked(**({**settings.model_dump(), **more} if settings else more))
    check_device(settings)
    waiting = held_out(settings, federation)
    training, joining = divide(federation, waiting)
    settings.cohort_size(training.n_clients)
    if isinstance(algorithm, str):
        name = name or algorithm
        algorithm = build(algorithm, lookup("algorithm", algorithm, ALGORITHMS), options or {})
    if isinstance(model, str):
        module = make_model(
            model,
            federation,
            options=model_options,
            seed=settings.seed,
            batch_size=settings.batch_size,
            engine=settings.engine,
        )
    else:
        module = copy.deepcopy(model)
        check_model(module, federation, batch_size=settings.batch_size, engine=settings.engine)
    trained = copy.deepcopy(module)
    if algorithm.network:
        trained = wrapped(algorithm.network, module, sample(federation), settings.seed)
    config = {
        "algorithm": name or "custom",
        "definition": str(algorithm),
        "options": dict(options or {}),
        "model": model if isinstance(model, str) else type(model).__name__,
        "model_options": dict(model_options or {}),
        "data": federation.name,
        "partition": dict(federation.partition),
        "split": federation.manifest()["hash"],
        **settings.model_dump(),
    }
    folder = None if out is None else RunFolder.open(Path(out), config, resume=resume)
    if folder and folder.finished:
        return Result.load(folder.path)
    run = Run(algorithm, training, trained, settings, config, folder)
    result = run.go(watch or (lambda _: None), stop or (lambda: False))
    if not result.finished:
        return result
    remains = Remains(
        run.algorithm, module, run.task.model, run.server, run.clients.common, training.n_clients
    )
    if joining:
        newcomers = join(remains, joining, settings, settings.join_rounds).facts["newcomers"]
        result = replace(result, facts={**result.facts, "newcomers": newcomers})
    if folder:
        result.finish(folder)
        result = replace(Result.load(folder.path), module=result.module)
    return replace(result, remains=remains)


def divide(federation: Federation, held_out: list[int]) -> tuple[Federation, Federation | None]:
    """The clients that train, and those that join afterwards, if any."""
    if not held_out:
        return federation, None
    rest = tuple(c for i, c in enumerate(federation.clients) if i not in set(held_out))
    return replace(federation, clients=rest), replace(
        federation, clients=tuple(federation.clients[i] for i in held_out)
    )
