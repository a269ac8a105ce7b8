"""`fit`: train one algorithm on a federation."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..algorithms import ALGORITHMS
from ..core.algorithm import Algorithm
from ..core.errors import ConfigError, DivergedError
from ..core.hardware import check_device
from ..core.options import build, look_up
from ..core.settings import Settings
from ..data import Federation
from ..models import check_model, make_model
from .backends.ray import check_ray, open_ray_backend
from .context import Progress
from .loop import RoundLoop
from .newcomers import train_newcomers
from .result import Result, TrainedServer
from .setup import build_trained_module, hold_out_newcomers
from .storage.folder import RunFolder
from .tensorboard import check_tensorboard, log_rounds

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
    tensorboard: Path | str | None = None,
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
        tensorboard: a folder of this run alone for event files, which TensorBoard shows while the run goes on.
        settings: rounds, learning rate and so on; single ones can be given by keyword instead: `rounds=100`.
        more: single settings.

    Raises:
        ConfigError: unknown names or options, impossible values, or TensorBoard is not installed.
        ModelError: the model does not fit the data.
        RunError: `out` is in use or belongs to another run, or training diverged on every client.

    Examples:
        >>> import fedattune
        >>> data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
        >>> result = fedattune.fit("fedmcsa", data, rounds=3, lr=0.1, options={"sigma": 20.0})
        >>> result.rounds, result.headline, len(result.clients)
        (3, 'trained', 4)
        >>> 0.5 < result.metrics["acc_uniform"] <= 1
        True

    """
    if not isinstance(federation, Federation):
        raise ConfigError(
            f"fit needs a Federation, got {type(federation).__name__}; make one with fedattune.federation(clients)"
        )
    settings = Settings.from_keywords(**({**settings.model_dump(), **more} if settings else more))
    check_device(settings)
    check_ray(settings)
    if tensorboard is not None:
        check_tensorboard()
    training, joining = hold_out_newcomers(federation, settings)
    if isinstance(algorithm, str):
        name = name or algorithm
        algorithm = build(algorithm, look_up("algorithm", algorithm, ALGORITHMS), options or {})
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
    trained = build_trained_module(algorithm, module, federation, settings.seed)
    config = {
        "algorithm": name or "custom",
        "definition": str(algorithm),
        "options": dict(options or {}),
        "model": model if isinstance(model, str) else type(model).__name__,
        "model_options": dict(model_options or {}),
        "data": federation.name,
        "partition": dict(federation.partition),
        "split": federation.digest,
        **settings.model_dump(),
    }
    folder = None if out is None else RunFolder.open(Path(out), config, resume=resume)
    if folder and folder.is_finished:
        return Result.load(folder.path)
    with open_ray_backend(settings) as places:
        run = RoundLoop(algorithm, training, trained, settings, config, folder, places)
        events = None if tensorboard is None else Path(tensorboard)
        try:
            with log_rounds(events, run, watch or (lambda _: None)) as tell:
                result = run.go(tell, stop or (lambda: False))
        except BaseException:
            run.store.close()  # else it stays locked for as long as somebody has the traceback, as notebooks do
            raise
    if not result.finished:
        return result
    remains = TrainedServer(
        run.algorithm, module, run.task.model, run.server, run.place.common, training.n_clients
    )
    if joining:
        result = replace(
            result, facts={**result.facts, **_collect_newcomer_facts(remains, joining, config, result.notes)}
        )
    if folder:
        result.finish(folder)
        result = replace(Result.load(folder.path), module=result.module)
    return replace(result, remains=remains)


def _collect_newcomer_facts(
    remains: TrainedServer, clients: Federation, config: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """Facts about clients that join after training; that they could not be trained is no reason to lose the run."""
    try:
        joined = train_newcomers(remains, clients, config, config["join_rounds"])
    except DivergedError as error:
        return {"notes": [*notes, f"{config['algorithm']}: of the clients that join after training: {error}"]}
    return {"newcomers": joined.facts["newcomers"]}
