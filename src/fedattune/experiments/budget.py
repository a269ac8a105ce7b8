"""Decide how much to train within a budget of time: model, rounds, tuning, and splits until the verdict is sure.

1. Baselines: the constant, and scikit-learn's regularised linear model and gradient boosting, alone and pooled.
2. Model: linear, additive or one hidden layer, whichever trains better alone or with one shared model, on validation
   data. The rounds double while the validation curves of these runs still move.
3. Splits: on each, every method is tuned anew, then trained. So no test row has a say in the rate and options of what
   it tests. Model, rounds and scaling, the same for all methods, are chosen once, also by rows that later splits test.

After 3, 5 and 10 splits the verdict is looked at; training ends when it is sure, or when the time is up.

Refused: Ray Tune and Optuna, whose schedulers stop single trials; here all methods need the same share of the time,
and a verdict over splits says when to stop.
"""

import math
import re
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ..analysis.compare import BASELINE, average_clients, average_weighted, read_baselines, weigh_tests
from ..analysis.folder import BUDGET_FILE, seal_experiment
from ..core.errors import ConfigError
from ..core.io import read_json, write_json
from ..core.metrics import METRICS, MetricName
from ..core.options import write_option
from ..core.settings import Settings
from ..data.types import Scaling
from .baselines import BOOSTING_POOLED, score_newest, train_baselines
from .plan import FailedRun, Plan, ShouldStop, StoppedError, make_jobs, make_plan
from .runner import ProgressDisplay, train_all
from .tuning import TUNING_FOLDER, Tuning, count_cost, tune_plan

if TYPE_CHECKING:
    from ..analysis.compare import Baseline
    from ..analysis.verdict import Verdict
    from ..data import Federation
    from ..runs.callbacks import Callback
    from ..runs.result import Result

DEFAULT_BUDGET = "5m"
MAX_SMALL_VALUES = 5_000_000
"""Input values of all samples up to which data are small, so that they have a budget by default."""
DECIDES_ALONE = {"tune", "splits", "seeds"}
"""Options that a budget decides."""
NO_TRAINING = {
    "seed", "engine", "device", "dtype", "client_state", "mixed_precision", "held_out", "join_rounds", "early_stopping",
    "eval_every", "eval_clients", "ray_address", "ray_actors", "ray_gpus",
}  # fmt: skip
"""Settings that do not say how much to train."""
MODELS = ("mlr", "dnn")
TABLE_MODELS = ("mlr", "gam", "dnn")
"""Models to try on tables with numbers: of 0 and 1, an additive model makes no more than a linear one."""
SPLITS = (3, 5, 10)
"""Numbers of splits after which the verdict is looked at."""
MIN_ROUNDS, MAX_ROUNDS = 10, 200
PILOT_ROUNDS = 3
"""Rounds by which the pace is measured."""
MAX_TUNING = 2
"""Budget of each method's tuning on one split, in full runs."""
MAX_STEPS = 200
"""Steps of an epoch of the largest client, from which the batch size follows."""
MIN_STEPS = 5
"""Steps of a round of the median client, from which the epochs follow: tiny clients take one step for an epoch."""
COST_FACTOR = 1.7
"""Time of a run, averaged over methods, relative to training alone and to the first other method."""
RESERVE = 0.2
"""Share of the time for estimates that are too low, when the rounds are planned."""
SPLIT_MARGIN = 1.15
"""Factor on the estimated time of a split; a split that is not finished in time is lost."""
REPORT_SHARE, REPORT_SECONDS = 0.05, 0.005
"""Time to read the data and write the report: share of the budget, and seconds for each client."""
MAX_REPORT_SHARE = 0.2
NEWEST_SHARE = 0.05
"""Maximum share of the remaining time that boosting may take to be tested on the newest rows of a table."""
MOVING_SHARE = 0.9
"""Share of the rounds after which a best validation round says that more rounds may be better."""
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_budget(text: str) -> float | None:
    """Read a budget such as 5m, 90s or 2h as seconds; None for off."""
    if text == "off":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or not float(match[1]):
        raise ConfigError(f"{write_option('budget')}: got {text!r}, expected a time such as 5m, 90s or 1h, or off")
    return float(match[1]) * UNITS[match[2]]


def format_seconds(seconds: float) -> str:
    """Write a time in the largest unit that shows it whole."""
    unit = next(unit for unit in ("h", "m", "s") if not seconds % UNITS[unit] or unit == "s")
    name, n = {"h": "hour", "m": "minute", "s": "second"}[unit], seconds / UNITS[unit]
    return f"{n:g} {name}{'s' * (n != 1)}"


def settle_budget(plan: Plan, given: Collection[str]) -> Plan:
    """Decide whether a comparison has a budget, and what is left for it to choose.

    By default, tables and small data have one, unless the user says how much to train by the options `given`.
    """
    experiment = plan.experiment
    if experiment.budget is not None:
        seconds = parse_budget(experiment.budget)
        if seconds and (needless := sorted(DECIDES_ALONE & set(given))):
            names = " and ".join(map(write_option, needless))
            raise ConfigError(f"{write_option('budget')} decides about {names}; leave {names} out, or give it as off")
    else:
        told = set(given) & (DECIDES_ALONE | (Settings.flat_fields().keys() - NO_TRAINING))
        federation = plan.federation
        is_small = federation.schema is not None or federation.x.numel() <= MAX_SMALL_VALUES
        on_ray = experiment.execution.ray is not None
        seconds = None if told or not is_small or on_ray else parse_budget(DEFAULT_BUDGET)
    if seconds is None:
        return replace(plan, experiment=experiment.model_copy(update={"budget": "off"}))
    changes: dict[str, Any] = {"budget": f"{seconds:.12g}s"}
    tokens = plan.federation.schema is not None and bool(plan.federation.schema.tokens)
    if "baseline" not in given and not tokens:
        changes["baseline"] = ("majority", "sklearn")
    has_numbers = plan.federation.schema is not None and bool(plan.federation.schema.numbers)
    models = () if "model" in given or tokens else TABLE_MODELS if has_numbers else MODELS
    experiment = experiment.model_copy(update=changes)
    if plan.federation.schema is not None:
        sizes = plan.federation.part("train").sizes
        if "batch_size" not in given:
            batch_size = max(experiment.training.batch_size, -(-int(sizes.max()) // MAX_STEPS))
            experiment = experiment.replace(batch_size=batch_size)
        if not {"epochs", "steps"} & set(given):
            steps = -(-int(np.median(sizes)) // experiment.training.batch_size)
            experiment = experiment.replace(epochs=max(1, MIN_STEPS // max(1, steps)))
    free = {"rounds"} - set(given)
    if plan.federate is not None and plan.federation.schema is not None and plan.federation.schema.numbers:
        free |= {"scaling"} - set(given)
    return replace(plan, experiment=experiment, models=models, free=frozenset(free))


CLEARLY_LESS = 0.99
"""Share of a loss below which another one is clearly less."""


def suggest_client_feature(baselines: "Sequence[Baseline]") -> list[str]:
    """Suggest to give the client's name to shared models if a pooled model is better with it on every split."""
    losses: dict[str, list[float]] = {}
    for one in baselines:
        if one.name.startswith(("ridge pooled", "logistic pooled")) and "validation" in one.predictions:
            part = one.predictions["validation"]
            losses.setdefault(one.name, []).append(part.pooled["rmse" if part.is_regression else "log_loss"])
    for name, plain in losses.items():
        with_client = losses.get(f"{name}+client", [])
        if len(plain) == len(with_client) and all(
            b < CLEARLY_LESS * a for a, b in zip(plain, with_client, strict=True)
        ):
            return [
                f"one model of all rows is better if it knows the client ({name}+client): "
                f"{write_option('client_feature')} gives the client's name to the methods, too"
            ]
    return []


@dataclass
class Outcome:
    """The runs, baselines and notes of a trained comparison; within a budget, of all whole splits."""

    results: "list[Result]" = field(default_factory=list)
    failed: list[FailedRun] = field(default_factory=list)
    baselines: "list[Baseline]" = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_stopped: bool = False


class Budget:
    """The time that is left, and the choices so far; both are kept in the folder, so that a resumed run has them."""

    def __init__(self, seconds: float, out: Path, n_clients: int = 0, **choices: Any) -> None:
        self.file = out / BUDGET_FILE
        state: dict[str, Any] = read_json(self.file) if self.file.exists() else {}
        self.choices: dict[str, Any] = {**choices, **state.get("choices", {})}
        self.spent_before = float(state.get("spent", 0.0))
        self.seconds, self.started = seconds, time.monotonic()
        self.for_report = min(REPORT_SHARE * seconds + REPORT_SECONDS * n_clients, MAX_REPORT_SHARE * seconds)

    @property
    def spent(self) -> float:
        return self.spent_before + time.monotonic() - self.started

    @property
    def left(self) -> float:
        return self.seconds - self.for_report - self.spent

    def begin(self, what: str) -> None:
        """Note when something begins; a resumed run goes on with what it began before."""
        self.choices.setdefault("began", {}).setdefault(what, round(self.spent, 1))
        self.save()

    def measure(self, what: str) -> float:
        """Return the seconds that were spent since something began."""
        return self.spent - float(self.choices["began"][what])

    def save(self, **choices: Any) -> None:
        self.choices |= choices
        write_json(self.file, {"seconds": self.seconds, "spent": round(self.spent, 1), "choices": self.choices})


def train_within_budget(
    plan: Plan,
    seconds: float,
    out: Path,
    should_stop: ShouldStop,
    display: ProgressDisplay,
    *,
    processes: Any = "auto",
    callbacks: "Sequence[Callback]" = (),
) -> Outcome:
    """Train a comparison within a budget; what is finished in the folder is taken from there.

    A stop, or the end of the time, keeps the splits on which all methods have finished.

    Raises:
        StoppedError: stopped before the first split was finished.
    """
    budget = Budget(seconds, out, plan.federation.n_clients, models=list(plan.models), free=sorted(plan.free))
    return _Trainer(plan, budget, out, should_stop, display, processes, callbacks).train()


class Stages(ProgressDisplay):
    """Show what goes on, and not the hundreds of short runs."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display

    def print_line(self, line: str) -> None:
        self._display.print_line(line)


class Pace(NamedTuple):
    """Seconds of a run besides its rounds, and of a round."""

    preparation: float
    round: float


class Trial(NamedTuple):
    """A model that was tried: its rounds, its validation score, and whether its curves still move at the end.

    `seconds` is the time of one full run.
    """

    rounds: int
    score: float
    is_moving: bool
    seconds: float


@dataclass
class _Trainer:
    plan: Plan
    budget: Budget
    out: Path
    should_stop: ShouldStop
    display: ProgressDisplay
    processes: Any
    callbacks: "Sequence[Callback]"

    def __post_init__(self) -> None:
        self.outcome = Outcome()
        self.federations: list[Federation] = []
        self.one_pass = 0.0  # seconds of one full run of every method
        self.n_trained_before = int(self.budget.choices.get("splits", 0))  # of a run that is resumed

    def train(self) -> Outcome:
        """Go through the stages until the verdict is sure or the time is up."""
        try:
            self.budget.save()
            first = tuple(name for name in self.plan.experiment.baseline if name != "centralized")  # it is tuned later
            quick = self.plan.experiment.model_copy(update={"baseline": first})
            self.outcome.baselines = self._train_baselines(replace(self.plan, experiment=quick))
            self._test_newest()
            self._choose_model()
            for split, plan in self._make_splits():
                is_new = split >= max(1, self.n_trained_before)
                if is_new and (self._is_sure() or self.budget.left < self._time_rest(split)):
                    break
                self._train_split(split, plan)
        except StoppedError:
            if not self.federations:
                self.budget.save()
                raise
            self.outcome.is_stopped = self.should_stop()
        self._discard_unfinished()
        self.budget.save()
        self.outcome.notes = self._write_notes()
        return self.outcome

    def _is_over(self) -> bool:
        """Tell whether to stop now: when asked to, or late, once there is a split to report."""
        has_split = len(self.federations) >= max(1, self.n_trained_before)
        return self.should_stop() or (self.budget.left <= 0 and has_split)

    def _say(self, what: str) -> None:
        minutes, seconds = divmod(max(0, round(self.budget.left)), 60)
        self.display.print_line(f"{minutes}:{seconds:02d} left: {what}")

    def _train_baselines(self, plan: Plan) -> "list[Baseline]":
        show = (lambda _: None) if self.federations else self._say
        return train_baselines(plan, self.out, self._is_over, show)

    def _test_newest(self) -> None:
        """Find out whether the newest rows of a table are predicted far worse than random ones."""
        seconds = [one.seconds for one in self.outcome.baselines if one.name == BOOSTING_POOLED]
        if "newest" in self.budget.choices or not seconds or seconds[0] > NEWEST_SHARE * self.budget.left:
            return
        self.budget.save(newest=score_newest(self.plan, self.outcome.baselines, self._say))

    def _time_split(self, tuning: int) -> float:
        """Estimate the seconds to plan for one more split with such a budget for each method's tuning."""
        return SPLIT_MARGIN * (self.one_pass * (1 + self._cost_of(tuning)) + self._time_baselines())

    def _time_rest(self, split: int) -> float:
        """Estimate the seconds of a split with the least tuning; of one that was begun before, of what is left."""
        began = self.budget.choices.get("began", {})
        done = self.budget.measure(f"split-{split}") if f"split-{split}" in began else 0.0
        return self._time_split(1) - done

    def _time_baselines(self) -> float:
        """Return the seconds of all baselines of one split."""
        baselines = self.outcome.baselines
        return sum(one.seconds for one in baselines) / max(1, len({one.split for one in baselines}))

    def _cost_of(self, tuning: int) -> float:
        return count_cost(tuning, self.plan.experiment.rounds, choose_only=True).full_runs

    def _choose_model(self) -> None:
        """Choose the model and the rounds by tuning training alone and one other method with a budget of one run."""
        choices = self.budget.choices
        if "model" not in choices:
            methods = [BASELINE, *[name for name in self.plan.algorithms if name != BASELINE][:1]]
            tried, affordable = self._plan_trials(methods)
            rounds = self.plan.experiment.rounds
            if "rounds" in choices["free"]:
                rounds = max(MIN_ROUNDS, min(rounds, affordable))
            trials = {}
            for model, scaling in tried:
                self._say(f"trying the model {model}" + ", with per-client scaling" * (scaling is not None))
                trials[model, scaling] = self._try_model(model, rounds, methods, scaling)
            best, best_scaling = max(trials, key=lambda one: trials[one].score)
            trial, scaling = trials[best, best_scaling], best_scaling or self.plan.experiment.scaling
            self._scale(scaling)
            while trial.is_moving and "rounds" in choices["free"] and self._can_afford(2 * trial.rounds, trial):
                self._say(f"{best} still learns after {trial.rounds} rounds: trying {2 * trial.rounds}")
                trial = self._try_model(best, 2 * trial.rounds, methods)
            self.one_pass = COST_FACTOR * trial.seconds * len(self.plan.algorithms)
            self.budget.save(
                model=best, rounds=trial.rounds, scaling=scaling, one_pass=self.one_pass, is_moving=trial.is_moving
            )
        self.one_pass = choices["one_pass"]
        self._scale(choices["scaling"])
        self.plan = self._change(choices["model"], choices["rounds"], list(self.plan.algorithms))

    def _plan_trials(self, methods: Sequence[str]) -> tuple[list[tuple[str, Scaling | None]], int]:
        """Choose the models and scalings to try, as many as the time allows, and count the rounds that it allows."""
        choices = self.budget.choices
        models = choices["models"] or [self.plan.experiment.model]
        scalings: list[Scaling | None] = [None, "client"] if "scaling" in choices["free"] else [None]
        plans = [list(product(models, scalings))]
        plans += [[(model, None) for model in models[:n]] for n in range(len(models), 0, -1)]
        needed = MIN_ROUNDS + 1 if "rounds" in choices["free"] else self.plan.experiment.rounds
        if "affordable_rounds" not in choices:
            paces: dict[str, Pace] = {}
            for tried in plans:
                slowest = tried[-1][0]
                if slowest not in paces:
                    paces[slowest] = self._measure_pace(slowest, methods[-1])
                affordable = self._count_affordable(paces[slowest], len(tried) * len(methods))
                if affordable >= needed:
                    break
            self.budget.save(affordable_rounds=affordable, n_tried=len(tried))
        tried = next(one for one in plans if len(one) == choices["n_tried"])
        return tried, int(choices["affordable_rounds"])

    def _count_affordable(self, pace: Pace, n_trials: int) -> int:
        """Count the rounds with which so many trials, and one split with the least tuning, fit into the time."""
        n_methods = len(self.plan.algorithms)

        def estimate(rounds: int) -> float:
            trial, tuning = (count_cost(1, rounds, choose_only=one) for one in (False, True))
            n_runs = n_trials * trial.runs + n_methods * (tuning.runs + 1)
            n_full = n_trials * trial.full_runs + COST_FACTOR * n_methods * (tuning.full_runs + 1)
            return n_runs * pace.preparation + n_full * rounds * pace.round

        most, left = max(MAX_ROUNDS, self.plan.experiment.rounds), (1 - RESERVE) * self.budget.left
        return next((rounds for rounds in range(most, 0, -1) if estimate(rounds) <= left), 0)

    def _measure_pace(self, model: str, method: str) -> Pace:
        plan = self._change(model, PILOT_ROUNDS, [method])
        folder = self.out / TUNING_FOLDER / "pace"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
        started = time.monotonic()
        job = plan.make_job(method, plan.experiment.seed, "measuring the pace", folder)
        results, _ = train_all([job], self._is_over, Stages(self.display), scratch=self.out, processes=1)
        seconds = time.monotonic() - started
        ends = [one.seconds for one in results[0].store.rounds()] if results else [0.0, seconds]
        a_round = (ends[-1] - ends[0]) / max(1, len(ends) - 1)  # the first one prepares much
        shutil.rmtree(folder, ignore_errors=True)
        return Pace(max(0.0, seconds - len(ends) * a_round), a_round)

    def _scale(self, scaling: Scaling) -> None:
        """Let the clients' numbers have another scaling from now on."""
        experiment = self.plan.experiment
        if scaling != experiment.scaling and self.plan.federate is not None:
            federations = (self.plan.federate(0, scaling),)
            changed = experiment.model_copy(update={"scaling": scaling})
            self.plan = replace(self.plan, experiment=changed, federations=federations)

    def _try_model(self, model: str, rounds: int, methods: Sequence[str], scaling: Scaling | None = None) -> Trial:
        label = f"model-{re.sub(r'[^A-Za-z0-9_]', '_', model)}-{rounds}" + (f"-{scaling}" if scaling else "")
        trials = self.budget.choices.setdefault("trials", {})
        if label in trials:
            rounds, score, *others = trials[label]
            return Trial(rounds, -math.inf if score is None else score, *others)  # null if every run diverged
        self.budget.begin(label)
        plan = self._change(model, rounds, methods)
        if scaling is not None and self.plan.federate is not None:
            plan = replace(plan, federations=(self.plan.federate(0, scaling),))
        tuning = self._tune(plan, 1, label)
        seconds = self.budget.measure(label) / (len(methods) * count_cost(1, rounds).full_runs)
        is_moving = any(one >= MOVING_SHARE * rounds for one in tuning.best_rounds.values())
        trial = Trial(rounds, max(tuning.scores.values()), is_moving, seconds)
        trials[label] = list(trial)
        self.budget.save()
        return trial

    def _can_afford(self, rounds: int, trial: Trial) -> bool:
        """Tell whether three splits with so many rounds and the least tuning fit into half of the time that is left."""
        one_pass = COST_FACTOR * trial.seconds * rounds / trial.rounds * len(self.plan.algorithms)
        n_splits = SPLITS[0] if self.plan.federate else 1
        a_split = one_pass * (1 + count_cost(1, rounds, choose_only=True).full_runs)
        seconds = n_splits * a_split + (n_splits - 1) * self._time_baselines()
        return rounds <= MAX_ROUNDS and seconds < self.budget.left / 2

    def _make_splits(self) -> Iterator[tuple[int, Plan]]:
        yield 0, self.plan
        if self.plan.federate is None:
            return
        for split in range(1, SPLITS[-1]):
            yield split, replace(self.plan, federations=(self.plan.federate(split, self.plan.experiment.scaling),))

    def _choose_tuning(self) -> int:
        """Choose the runs for tuning, so that the splits up to the next look at the verdict fit into the time."""
        n_done = len(self.federations)
        n_needed = next(n for n in SPLITS if n > n_done) - n_done if self.plan.federate else 1
        affordable = (n for n in range(MAX_TUNING, 1, -1) if n_needed * self._time_split(n) < self.budget.left)
        return next(affordable, 1)

    def _train_split(self, split: int, plan: Plan) -> None:
        """Tune and train all methods on one split."""
        choices, label = self.budget.choices, f"split-{split}"
        runs = choices.setdefault("tuning_runs", {}).setdefault(str(split), self._choose_tuning())
        self.budget.begin(label)
        self._say(f"split {split + 1}: tuning {len(plan.algorithms)} methods")
        tuning = self._tune(plan, runs, label if split else "", choose_only=True)
        self._say(f"split {split + 1}: training {len(plan.algorithms)} methods")
        plan = replace(plan, tuned=tuning.choices)
        jobs = make_jobs(plan, self.out)
        results, failed = train_all(
            [replace(job, callbacks=tuple(self.callbacks)) for job in jobs],
            self._is_over,
            Stages(self.display),
            scratch=self.out,
            processes=self.processes,
        )
        seconds = self.budget.measure(label)
        self.outcome.baselines = self._train_baselines(plan)
        self.federations.append(plan.federation)
        self.outcome.results += results
        self.outcome.failed += failed
        if split >= self.n_trained_before:  # others were read from the folder
            self.one_pass = seconds / (1 + self._cost_of(runs))
        self.budget.save(splits=max(len(self.federations), self.n_trained_before), one_pass=self.one_pass)

    def _tune(self, plan: Plan, runs: int, label: str, *, choose_only: bool = False) -> Tuning:
        tuning = tune_plan(
            plan, runs, self.out, self._is_over, Stages(self.display), self.processes, label=label, keep_going=True,
            choose_only=choose_only,
        )  # fmt: skip
        seal_experiment(self.out)
        return tuning

    def _is_sure(self) -> bool:
        """Look at the verdict after some numbers of splits; each look more would make it wrong more often."""
        if len(self.federations) not in SPLITS:
            return False
        verdict = self._reach_verdict()
        self._say(f"{len(self.federations)} splits: {verdict.answer}")
        return verdict.is_clear

    def _reach_verdict(self) -> "Verdict":
        from ..analysis.verdict import reach_verdict

        outcome, metric = self.outcome, self.plan.metric
        failed = [one.algorithm for one in outcome.failed]
        return reach_verdict(outcome.results, baselines=outcome.baselines, metric=metric, failed=failed, is_tuned=True)

    def _discard_unfinished(self) -> None:
        """Remove what belongs to a split that is not whole, so that all readers of the folder see the same splits."""
        n_splits = max(len(self.federations), self.n_trained_before)
        found = [path for path in (self.out / TUNING_FOLDER).iterdir() if path.is_dir()]
        parts = [*self.out.glob("*/seed-*-split-*"), *self.out.glob("baselines/*/split-*")]
        found += [folder for folder in parts if int(folder.name.rpartition("-")[2]) >= n_splits]
        for folder in found:
            shutil.rmtree(folder, ignore_errors=True)
        seal_experiment(self.out)
        self.outcome.baselines = read_baselines([self.out])

    def _change(self, model: str, rounds: int, methods: Sequence[str]) -> Plan:
        """Make the plan again with another model, other rounds, or fewer methods."""
        plan, experiment = self.plan, self.plan.experiment.model_copy(update={"model": model})
        changed = make_plan(experiment.replace(rounds=rounds), plan.federation)
        algorithms = {name: changed.algorithms[name] for name in methods}
        return replace(changed, algorithms=algorithms, federate=plan.federate, notes=plan.notes, models=plan.models)

    def _write_notes(self) -> list[str]:
        choices, n = self.budget.choices, len(self.federations)
        tried = {label.split("-")[1] for label in choices.get("trials", {})}
        why = ", the best on validation data" if len(tried) > 1 else ""
        where = f"each of {n} random split{'s' * (n > 1)}" if self.plan.federate else "the one split"
        why += "; per-client scaling is better on validation data" * (
            "scaling" in choices["free"] and choices["scaling"] == "client"
        )
        notes = [
            f"within {format_seconds(self.budget.seconds)}: the model is {choices['model']}{why}; {choices['rounds']} "
            f"rounds; every method tuned by validation data on {where}; "
            f"{write_option('budget')} off trains once as told"
        ]
        may_double = choices["is_moving"] and "rounds" in choices["free"] and choices["rounds"] < MAX_ROUNDS
        is_short = may_double and choices["affordable_rounds"] <= choices["rounds"]
        fitting = [f"{choices['rounds']} rounds"] * is_short
        has_more_splits = self.plan.federate is not None and n < SPLITS[-1] and not self.outcome.is_stopped
        if has_more_splits and self._reach_verdict().answer == "undecided":
            fitting.append(f"{n} of {SPLITS[-1]} splits")
        lacking = [f"only {' and '.join(fitting)} were run"] * bool(fitting)
        models = [model for model in choices["models"] if model not in tried]
        named = [f"the model{'s' * (len(models) > 1)} {' and '.join(models)}"] * bool(models)
        is_scaled = "scaling" in choices["free"] and choices["n_tried"] <= max(1, len(choices["models"]))
        untried = [*named, *["per-client scaling"] * is_scaled]
        if untried:
            verb = "were" if len(models) + is_scaled > 1 else "was"
            lacking.append(f"{(', and ' if len(models) > 1 else ' and ').join(untried)} {verb} not tried")
        if lacking:
            notes.append(
                f"for lack of time, {', and '.join(lacking)}: a longer {write_option('budget')} may change the answer"
            )
        if newest := choices.get("newest"):
            notes.append(self._describe_newest(*newest))
        experiment = self.plan.experiment
        may_have_it = experiment.client_column is not None and not experiment.client_feature
        return notes + suggest_client_feature(self.outcome.baselines) * may_have_it

    def _describe_newest(self, column: str, value: float) -> str:
        measure = METRICS[cast(MetricName, self.plan.metric)]
        same = [one for one in self.outcome.baselines if one.name == BOOSTING_POOLED]
        random = average_weighted(average_clients(same, measure.name), weigh_tests(same))
        values = f"{BOOSTING_POOLED}: {measure.label} {measure.format(value)} against {measure.format(random)}"
        return (
            f"the newest rows by {column!r} are predicted far worse than randomly chosen ones ({values}): "
            f"{write_option('split')} time tests on the newest rows, as in real use"
        )
