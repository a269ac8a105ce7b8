"""Plan an experiment: build and check all its parts, before anything is trained or written, and make its jobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..analysis.compare import BASELINE
from ..analysis.folder import make_run_name
from ..core.errors import ConfigError, FedAttuneError, ModelError, RunError
from ..core.metrics import check_metric, try_metric
from ..core.options import write_option
from ..core.own_code import get_short_name, is_reference
from ..core.targets import KIND_WORDS, NUMBER_KINDS
from .config import Experiment
from .load import (
    ALL_METHODS,
    IMAGE_SIZE,
    TABLE_COLUMN_OPTIONS,
    AssignedOptions,
    KnownOptions,
    assign_options,
    collect_errors,
    expand_names,
    find_known_options,
    list_partition_options,
)

if TYPE_CHECKING:
    from ..core.algorithm import Algorithm
    from ..core.settings import Settings
    from ..data import Dataset, Federation
    from ..data.splits import SplitKind
    from ..data.types import Scaling
    from ..runs.callbacks import Callback
    from ..runs.context import Progress
    from ..runs.result import Result

ProgressCallback = Callable[["Progress"], None]
"""Receives the progress of one run after every round."""
ShouldStop = Callable[[], bool]
"""Returns True once the user asks to stop."""


class StoppedError(Exception):
    """The user asked to stop; finished runs and checkpoints are kept."""


class WorkerKilledError(RunError):
    """The process that trained a run is gone."""


class FailedRun(NamedTuple):
    """A run without a result: training diverged, or its process was killed and the run can be resumed."""

    algorithm: str
    seed: int
    error: str
    folder: Path
    diverged: bool
    split: int = 0


class Combination(NamedTuple):
    """A learning rate and the tuned options of a method."""

    lr: float
    options: Mapping[str, Any]

    def describe(self) -> str:
        """Write the combination as on the command line."""
        return ", ".join([f"lr={self.lr:.3g}", *(f"{key}={value}" for key, value in self.options.items())])


@dataclass(frozen=True)
class Job:
    """One run of a plan: the arguments of `fit`, and a title for the terminal.

    An interrupted run in `folder` is resumed. `source` refers to the factory of a custom method.
    """

    title: str
    name: str
    algorithm: "Algorithm"
    federation: "Federation"
    model: str
    settings: "Settings"
    folder: Path
    options: Mapping[str, Any]
    model_options: Mapping[str, Any]
    callbacks: "tuple[Callback, ...]" = ()
    source: str | None = None

    @property
    def is_finished(self) -> bool:
        """True if the run folder holds the result."""
        return (self.folder / "result.json").exists()

    def train(self, on_progress: ProgressCallback, should_stop: ShouldStop) -> "Result":
        """Train the run in this process; the result is unfinished if `should_stop` returned True."""
        from ..runs.callbacks import OnRound
        from ..training.fit import prepare_run, train_run

        def on_round(progress: "Progress") -> bool:
            on_progress(progress)
            return should_stop()

        run = prepare_run(
            self.algorithm,
            self.federation,
            self.model,
            name=self.name,
            source=self.source,
            options=self.options,
            model_options=self.model_options,
            settings=self.settings,
            check=False,  # the plan has done that
        )
        return train_run(
            run,
            out=self.folder,
            resume=(self.folder / "config.json").exists(),  # a kill may have left the folder alone
            callbacks=(*self.callbacks, OnRound(on_round)),
        )


class Federate(Protocol):
    """Makes the federation of a further split."""

    def __call__(self, split_number: int, scaling: "Scaling", split: "SplitKind | None" = None) -> "Federation": ...


@dataclass(frozen=True)
class Plan:
    """The checked parts of an experiment: a federation per split, options as given, and the methods built with them.

    `sources` maps custom methods to references to their factories. `tuned` is what tuning chose, if it did. `models`
    are those that a budget chooses from, `free` the settings that it chooses, and `federate` makes the federation of a
    further split, if there are random ones.
    """

    experiment: Experiment
    federations: "Sequence[Federation]"
    options: Mapping[str, Mapping[str, Any]]
    model_options: Mapping[str, Any]
    algorithms: "Mapping[str, Algorithm]"
    sources: Mapping[str, str] = field(default_factory=dict)
    tuned: "Mapping[str, Combination]" = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    free: frozenset[str] = frozenset()
    federate: "Federate | None" = None

    @property
    def metric(self) -> str | None:
        return self.experiment.metric and get_short_name(self.experiment.metric)

    @property
    def federation(self) -> "Federation":
        return self.federations[0]

    def make_job(self, name: str, seed: int, title: str, folder: Path, federation: "Federation | None" = None) -> Job:
        """Make the job that trains one method with one seed on one split; it takes over what the plan has built."""
        job = Job(
            title=title,
            name=name,
            algorithm=self.algorithms[name],
            federation=federation or self.federation,
            model=self.experiment.model,
            settings=self.experiment.settings(seed),
            folder=folder,
            options=self.options[name],
            model_options=self.model_options,
            source=self.sources.get(name),
        )
        if name not in self.tuned:
            return job
        lr, tuned_options = self.tuned[name]
        options = {**job.options, **tuned_options}
        settings = job.settings.replace(lr=lr)
        return replace(job, algorithm=self.build_method(name, options), options=options, settings=settings)

    def build_method(self, name: str, options: Mapping[str, Any]) -> "Algorithm":
        from ..algorithms.own import build_method

        return build_method(self.sources.get(name, name), options)


def make_jobs(plan: Plan, out: Path) -> list[Job]:
    """Make one job for each method, split and seed."""
    experiment = plan.experiment
    seeds = range(experiment.seed, experiment.seed + experiment.seeds)
    jobs = []
    for name, federation, seed in product(plan.algorithms, plan.federations, seeds):
        split = int(federation.partition.get("split", 0))
        parts = [f"seed {seed}"] * (len(seeds) > 1) + [f"split {split}"] * (len(plan.federations) > 1 or split > 0)
        title = f"{name} ({', '.join(parts)})" if parts else name
        jobs.append(plan.make_job(name, seed, title, out / make_run_name(name, split, seed), federation))
    return jobs


def make_plan(experiment: Experiment, federation: "Federation | None" = None) -> Plan:
    """Build all parts of an experiment and check that they fit together; only caches are written.

    A `federation` is given if the data are loaded already.
    """
    from ..algorithms import ALGORITHMS
    from ..algorithms.own import build_method
    from ..data import PARTITIONS
    from ..models import complete_options, make_model
    from ..models.inputs import suit_inputs
    from ..training.clients.options import check_clients, check_method
    from ..training.setup import build_trained_module, hold_out_newcomers, settle_optimizer
    from ..training.uploads.pipeline import check_upload_steps

    are_all = ALL_METHODS in experiment.algorithms
    experiment = experiment.model_copy(update={"algorithms": expand_names(experiment.algorithms, ALGORITHMS)})
    known_options = find_known_options(experiment, methods=True)
    dataset = None if federation else _load_dataset(experiment, known_options)
    if dataset:
        partition = dataset.default_partition
    else:  # the name of a built-in partition that made the federation
        partition = str(federation.partition.get("name", "")) if federation else ""
        partition = partition if partition in PARTITIONS else ""
    assignment = _assign_all(experiment, known_options, partition)
    problems, rate_notes = list[str](), list[str]()
    options = {get_short_name(name): given for name, given in assignment["algorithm"].items()}
    sources = {get_short_name(name): name for name in experiment.algorithms if is_reference(name)}
    algorithms = {}
    for name in experiment.algorithms:
        with collect_errors(problems):
            algorithms[get_short_name(name)] = build_method(name, assignment["algorithm"][name])
    federations, federate = [] if federation is None else [federation], None
    with collect_errors(problems):
        if dataset:
            federate = partial(_federate, experiment, dataset, assignment)
            federations = [federate(k, experiment.scaling) for k in range(experiment.splits)]
        for one in federations[:1]:
            training, _ = hold_out_newcomers(one, experiment)
            check_upload_steps(experiment, training)
            check_clients(experiment, training)
            if "sklearn" in experiment.baseline and one.schema is not None and one.schema.tokens:
                problems.append(
                    f"{write_option('baseline')} sklearn: token numbers are no features of such a model; leave it out, "
                    f"or take {write_option('baseline')} centralized"
                )
            if "sklearn" in experiment.baseline and one.kind == "positions":
                problems.append(
                    f"{write_option('baseline')} sklearn: its models predict no class for each position; leave it out, "
                    f"or take {write_option('baseline')} centralized"
                )
            experiment = settle_local_work(settle_metric(experiment, one), is_table=one.schema is not None)
            experiment, rate_notes = settle_rate(experiment, training)
    if problems or not federations:
        raise ConfigError("; ".join(problems))
    federation = federations[0]
    notes = rate_notes
    if are_all and (unfit := find_unfit(algorithms, experiment, federation)):
        notes += [f"{name} is left out, {reason}." for name, reason in unfit.items()]
        algorithms = {name: one for name, one in algorithms.items() if name not in unfit}
        experiment = experiment.model_copy(update={"algorithms": tuple(algorithms)})
    model_options = complete_options(experiment.model, assignment["model"][experiment.model], federation.schema)
    module = make_model(
        experiment.model,
        federation,
        options=model_options,
        seed=experiment.seed,
        batch_size=experiment.training.batch_size,
        engine=experiment.execution.engine,
        clip=experiment.privacy.record.clip if experiment.privacy.record else None,
    )
    federation = suit_inputs(federation, module)
    before, experiment = experiment, settle_optimizer(experiment, algorithms.values(), experiment.model, model_options)
    if before is not experiment:
        name, rate = experiment.training.optimizer, experiment.training.lr
        notes += [f"clients train the pretrained network by {name} with lr {rate:g} ({write_option('optimizer')})."]
    for name, algorithm in algorithms.items():
        try:
            trained_module = build_trained_module(algorithm, module, federation, experiment.seed)
            check_method(algorithm, trained_module, experiment, federation)
        except FedAttuneError as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise ModelError("; ".join(problems))
    has_splits = federate is not None and experiment.split == "random" and is_divided_anew(experiment.partition)
    return Plan(
        experiment,
        federations,
        options,
        model_options,
        algorithms,
        sources,
        notes=tuple(notes),
        federate=federate if has_splits else None,
    )


def find_unfit(algorithms: "Mapping[str, Algorithm]", settings: "Settings", federation: "Federation") -> dict[str, str]:
    """Find the methods that do not suit the target, the optimizer or --dp-client: name -> reason."""
    from ..client import find_own_steps
    from ..core.optimizers import PLAIN
    from ..training.setup import make_optimizer
    from ..training.uploads.client_privacy import find_privacy_obstacle

    unfit = {}
    for name, algorithm in algorithms.items():
        need = algorithm.network.class_need if algorithm.network else None
        if make_optimizer(algorithm, settings) != PLAIN and find_own_steps(algorithm.client):
            unfit[name] = "as it has local steps of its own, and takes no optimizer"
        if need and federation.kind != "class":
            unfit[name] = f"as the target is {KIND_WORDS[federation.kind]}: {need}"
        if reason := find_privacy_obstacle(algorithm, settings):
            unfit[name] = f"as --dp-client does not protect it: {reason}"
    return unfit


def is_divided_anew(partition: str | None) -> bool:
    """Tell whether a partition draws the parts of its clients, which a saved one has stored."""
    from ..data import PARTITIONS

    return partition is None or partition in PARTITIONS or is_reference(partition)


def settle_metric(experiment: Experiment, federation: "Federation") -> Experiment:
    """Choose the metric if none is given; refuse what does not suit the target."""
    from ..data.federated import choose_metric

    metric = experiment.metric or choose_metric(federation)
    found = check_metric(metric, federation.kind)
    if is_reference(metric):
        try_metric(found, federation.kind, federation.output_shape)
    if experiment.rounds_to is not None and federation.kind in NUMBER_KINDS:
        raise ConfigError(
            f"{write_option('rounds_to')} {experiment.rounds_to:g} is an accuracy, and the target of {federation.name} "
            f"is {KIND_WORDS[federation.kind]}; leave it out"
        )
    return experiment.model_copy(update={"metric": metric})


def settle_local_work(experiment: Experiment, *, is_table: bool) -> Experiment:
    """Let a round be one epoch if the data are a table and the user gives neither steps nor epochs.

    Clients of a table differ in size by orders of magnitude: 20 steps would be a part of the largest client's rows, and
    many passes over the smallest one's. The run folder records the epoch, so that a resumed run has it, too. A folder
    of an older version records 20 steps by an explicit null, and keeps them.
    """
    is_given = {"steps", "epochs"} & experiment.given
    return experiment if is_given or not is_table else experiment.replace(epochs=1)


def settle_rate(experiment: Experiment, federation: "Federation") -> tuple[Experiment, list[str]]:
    """Lower the default learning rate of a table's model where its inputs would let training diverge; add a note.

    The data are standardised, but a rare category or a long tail may still be far from the mean.
    """
    has_own_scale = experiment.training.optimizer != "sgd"  # Adam's steps do not grow with the inputs
    if has_own_scale or "lr" in experiment.given or federation.schema is None or federation.schema.tokens:
        return experiment, []
    from ..training.safe_rate import compute_safe_rate

    training = experiment.training
    rate, usual = compute_safe_rate(federation, training.batch_size, experiment.loss), training.lr
    rate *= 1 - training.momentum  # in the end, steps are 1 / (1 - momentum) times as long
    if rate >= usual:
        return experiment, []
    rate = float(f"{rate:.1g}")
    for_momentum = f" for momentum {training.momentum:g}" if training.momentum else ""
    return experiment.replace(lr=rate), [
        f"the learning rate is {rate:g} and not {usual:g}, because the inputs are large{for_momentum}; "
        f"{write_option('lr')} sets it"
    ]


def prepare_command(command: str, experiment: Experiment) -> tuple[Experiment, list[str]]:
    """Fit the algorithms to the command: `run` trains one method, and `compare` needs the baseline; add notes."""
    names = experiment.algorithms
    if command == "run" and (len(names) > 1 or ALL_METHODS in names):
        raise ConfigError(f"run trains one algorithm, got {', '.join(names)}; use fedattune compare for several")
    if command == "run" and experiment.budget is not None:
        raise ConfigError(f"{write_option('budget')} {experiment.budget}: only compare has a budget; leave it out")
    if command == "run" and experiment.baseline != Experiment.flat_fields()["baseline"].default:
        raise ConfigError(f"{write_option('baseline')}: only compare has baselines; leave it out")
    if command == "run" or {BASELINE, ALL_METHODS} & set(names):
        return experiment, []
    with_baseline = experiment.model_copy(update={"algorithms": (BASELINE, *names)})
    return with_baseline, [f"{BASELINE} was added because the other methods are compared with it."]


def prepare_data(experiment: Experiment) -> "Federation":
    """Make the federation of an experiment; options of models and methods are allowed if the user named these."""
    is_named = bool({"algorithms", "model"} & experiment.given)
    known_options = find_known_options(experiment, methods=bool(experiment.set) and is_named)
    dataset = _load_dataset(experiment, known_options)
    assignment = _assign_all(experiment, known_options, dataset.default_partition)
    return _federate(experiment, dataset, assignment, 0, experiment.scaling)


def _assign_all(experiment: Experiment, known_options: KnownOptions, default: str) -> AssignedOptions:
    """Assign all options; only the loaded data know the `default` partition."""
    partition = experiment.partition or default
    options = {partition: list_partition_options(partition)} if partition else {}
    return assign_options(experiment.set, {**known_options, "partition": options})


def _load_dataset(experiment: Experiment, known_options: KnownOptions) -> "Dataset":
    from ..data import is_image_folder, is_table, load_data

    ((source, names),) = known_options["data"].items()
    options = assign_options(experiment.set, {"data": known_options["data"]}, [])["data"][source]
    if experiment.clients and "clients" in names and experiment.partition in (None, "by_column"):
        options.setdefault("clients", experiment.clients)  # this source makes its own clients
    if is_table(experiment.data):
        options |= {name: experiment.get(name) for name in TABLE_COLUMN_OPTIONS - {"client_column", "target"}}
    elif given := sorted(
        name
        for name in TABLE_COLUMN_OPTIONS - {"client_column", "target"}
        if experiment.get(name) != Experiment.flat_fields()[name].default  # a resumed run gives all
    ):
        flags = " and ".join(write_option(name) for name in given)
        raise ConfigError(f"{flags} goes only with a table file (.csv, .parquet), not with {experiment.data!r}")
    if is_image_folder(experiment.data):
        options[IMAGE_SIZE] = experiment.image_size
    elif experiment.image_size is not None:
        raise ConfigError(
            f"{write_option(IMAGE_SIZE)} goes only with a folder of images, not with {experiment.data!r}; leave it out"
        )
    return load_data(
        experiment.data,
        data_dir=experiment.data_dir,
        options=options,
        client_column=experiment.client_column,
        target=experiment.target,
    )


def _federate(
    experiment: Experiment,
    dataset: "Dataset",
    assignment: AssignedOptions,
    split_number: int,
    scaling: "Scaling",
    split: "SplitKind | None" = None,
) -> "Federation":
    """Divide the samples among clients, by the experiment's kind of split unless another is given."""
    from ..data import partition_dataset

    name = experiment.partition or dataset.default_partition
    return partition_dataset(
        dataset,
        partition=name,
        options=assignment["partition"][name],
        clients=experiment.clients,
        test=experiment.test,
        validation=experiment.validation,
        seed=experiment.split_seed,
        small_clients=experiment.small_clients,
        min_rows=experiment.min_rows,
        stratify=experiment.stratify,
        split=split or experiment.split,
        time_column=experiment.time_column,
        split_number=split_number,
        scaling=scaling,
    )
