"""`fit`: train one algorithm on a federation."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from ..algorithms.own import build_method
from ..core.algorithm import Algorithm
from ..core.errors import ConfigError, DivergedError, summarize_error
from ..core.hardware import check_device
from ..core.lock import lock_folder
from ..core.options import list_keywords
from ..core.own_code import get_short_name, is_reference, make_absolute
from ..core.settings import Settings, SettingsKeywords
from ..data import Federation
from ..models import build_seeded_model, check_model, complete_options, copy_module
from ..models.files import SOURCE_KEY
from ..models.inputs import suit_inputs
from ..runs.callbacks import Callback, StartedRun, check_callbacks
from ..runs.context import Progress
from ..runs.folder import RunFolder
from ..runs.result import Result, TrainedServer
from .backends.ray import check_ray, open_ray_backend
from .clients.options import check_clients, check_method
from .loop import RoundLoop
from .newcomers import train_newcomers
from .setup import build_trained_module, hold_out_newcomers, settle_optimizer
from .uploads.pipeline import check_upload_steps

__all__ = ["PreparedRun", "Progress", "fit", "prepare_run", "train_run"]


@dataclass(frozen=True)
class PreparedRun:
    """A run whose parts are built and fit together; `source` refers to the method's factory, if it is custom.

    `options` and `model_options` are those of a method and a model that are given by name.
    """

    name: str
    algorithm: Algorithm
    federation: Federation
    module: nn.Module
    settings: Settings
    model_name: str
    model_options: Mapping[str, Any]
    options: Mapping[str, Any]
    source: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {
            "algorithm": self.name,
            **({SOURCE_KEY: self.source} if self.source else {}),
            "definition": str(self.algorithm),
            "options": dict(self.options),
            "model": self.model_name,
            "model_options": dict(self.model_options),
            "data": self.federation.name,
            "partition": dict(self.federation.partition),
            "split": self.federation.digest,
            **self.settings.to_config(),
        }


def fit(
    data: Federation,
    algorithm: Algorithm | str,
    model: str | nn.Module = "mlr",
    *,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    settings: Settings | None = None,
    **more: Unpack[SettingsKeywords],
) -> Result:
    """Train one algorithm on a federation.

    Args:
        data: the clients' data.
        algorithm: an `Algorithm`, or the name of one with its `options`; "file.py:factory" or
            "package.module:factory" names a custom one.
        model: an `nn.Module` (its weights are every client's initial model), the name of a model with its
            `model_options`, "file.py:factory", or "package.module:factory".
        name: name of the method in tables and in the result; by default the algorithm's name.
        options: options of an algorithm that is given by name.
        model_options: options of a model that is given by name.
        out: run folder, new or empty; without it nothing is written and the run cannot be resumed.
        resume: go on in `out`; a finished run is returned as it is.
        callbacks: objects that follow the run, such as `TensorBoard`, `MLflow`, `WandB`, `EarlyStop`, `OnRound`, or of
            a class of your own that derives from `Callback`.
        settings: rounds, learning rate and so on; single ones can be given by keyword instead: `rounds=100`.
        more: single settings.

    Returns:
        The result of every client, and every client's model.

    Raises:
        ConfigError: unknown names or options, impossible values.
        ModelError: the model does not fit the data.
        RunError: `out` is in use or belongs to another run, or training diverged on every client.

    Examples:
        >>> import fedattune
        >>> data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
        >>> result = fedattune.fit(data, "fedmcsa", rounds=3, lr=0.1, options={"sigma": 20.0})
        >>> result.rounds, result.evaluation_point, len(result.clients)
        (3, 'trained', 4)
        >>> 0.5 < result.metrics["acc_uniform"] <= 1
        True
    """
    check_callbacks(callbacks)
    given = {**{name: settings.get(name) for name in settings.given}, **more} if settings else more
    settings = Settings.from_keywords(list_keywords(fit), **given)
    run = prepare_run(
        algorithm, data, model, name=name, options=options, model_options=model_options, settings=settings
    )
    return train_run(run, out=out, resume=resume, callbacks=callbacks)


def prepare_run(
    algorithm: Algorithm | str,
    federation: Federation,
    model: str | nn.Module,
    *,
    name: str | None = None,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    settings: Settings,
    check: bool = True,
) -> PreparedRun:
    """Build the parts of a run, and check that they fit together.

    Arguments and errors are the same as for `fit`. A plan has checked the parts of its runs: it says `check=False`. It
    also gives the `source` of a custom method, which it has built.
    """
    if check:
        if not isinstance(federation, Federation):
            raise ConfigError(_explain_wrong_data(federation, algorithm))
        check_device(settings)
        check_ray(settings)
        training, _ = hold_out_newcomers(federation, settings)
        check_upload_steps(settings, training)
        check_clients(settings, training)
    if isinstance(algorithm, str):
        source = make_absolute(algorithm) if is_reference(algorithm) else None
        name = name or get_short_name(algorithm)
        algorithm = build_method(algorithm, options or {})
    if isinstance(model, str):
        model = make_absolute(model)
        model_options = complete_options(model, model_options or {}, federation.schema)
        module = build_seeded_model(model, federation, options=model_options, seed=settings.seed)
    else:
        module = copy_module(model)
    settings = settle_optimizer(settings, [algorithm], model if isinstance(model, str) else module, model_options or {})
    if check:
        record = settings.privacy.record
        check_model(
            module,
            federation,
            batch_size=settings.training.batch_size,
            engine=settings.execution.engine,
            clip=record.clip if record else None,
        )
    return PreparedRun(
        name or "custom",
        algorithm,
        suit_inputs(federation, module),
        module,
        settings,
        model if isinstance(model, str) else type(model).__name__,
        model_options or {},
        options or {},
        source,
    )


def _explain_wrong_data(data: object, algorithm: object) -> str:
    if isinstance(algorithm, Federation):
        return 'fit takes the data before the method: fit(data, "fedavg", model)'
    return f"fit needs a Federation, got {type(data).__name__}; make one with fedattune.federation_from(clients)"


def train_run(
    run: PreparedRun, *, out: Path | str | None = None, resume: bool = False, callbacks: Sequence[Callback] = ()
) -> Result:
    """Train a prepared run; the result is unfinished if a callback stopped it."""
    path = None if out is None else Path(out)
    if path is None or (path.exists() and not path.is_dir()):
        return _train(run, path, resume=resume, callbacks=callbacks)
    with lock_folder(path):
        return _train(run, path, resume=resume, callbacks=callbacks)


def _train(run: PreparedRun, out: Path | None, *, resume: bool, callbacks: Sequence[Callback]) -> Result:
    settings, config = run.settings, run.config
    training, newcomers = hold_out_newcomers(run.federation, settings)
    trained_module = build_trained_module(run.algorithm, run.module, run.federation, settings.seed)
    check_method(run.algorithm, trained_module, settings, training)
    folder = None if out is None else RunFolder.open(out, config, resume=resume)
    if folder and folder.is_finished:
        return Result.load(folder.path)
    with ExitStack() as closing:
        for one in reversed(callbacks):
            closing.push(partial(_close, one))
        with open_ray_backend(settings) as make_backend:
            loop = RoundLoop(run.algorithm, training, trained_module, settings, config, folder, make_backend)
            start = StartedRun(config, out, loop.context, loop.store, loop.record.seconds)
            try:
                for one in callbacks:
                    one.on_fit_start(start)
                result = loop.run(callbacks)
            except BaseException:
                loop.store.close()  # else it stays locked for as long as somebody has the traceback, as notebooks do
                raise
        if result.is_finished:
            result = _finish(run, loop, result, folder, newcomers)
        for one in callbacks:
            one.on_fit_end(result)
    return result


def _close(callback: Callback, _kind: object, first: BaseException | None, _trace: object) -> None:
    """Close a callback; an error of it must not hide the first one, so it becomes a note there."""
    try:
        callback.close()
    except Exception as error:
        if first is None:
            raise
        first.add_note(f"{type(callback).__name__}.close: {summarize_error(error)}")


def _finish(
    run: PreparedRun, loop: RoundLoop, result: Result, folder: RunFolder | None, newcomers: Federation | None
) -> Result:
    context = loop.context
    trained_server = TrainedServer(
        context.algorithm, run.module, context.task.model, loop.server.state, loop.backend.statistics, context.n_clients
    )
    if newcomers:
        name, rounds = run.config["algorithm"], run.config["join_rounds"]
        try:
            facts = {"newcomers": train_newcomers(trained_server, newcomers, run.config, rounds).facts["newcomers"]}
        except DivergedError as error:  # a run is not lost because newcomers could not be trained
            facts = {"notes": [*result.notes, f"{name}: of the clients that join after training: {error}"]}
        result = replace(result, facts={**result.facts, **facts})
    if folder:
        result.finish(folder)
        # The predictions have been measured already.
        result = replace(Result.load(folder.path), module=result.module, predictions=result.predictions)
    return replace(result, trained_server=trained_server)
