"""Tuning: every method, `local` first of all, gets the same budget to choose its learning rate and its own options.

Successive halving (Jamieson and Talwalkar, AISTATS 2016; the one bracket s=2 of Hyperband with eta=3): many
combinations train for a ninth of the rounds, the best of them for a third, and the best of these for all. Each of the
three steps may cost a third of the budget, so a method with few options takes more of them further.

Only validation data choose, on a split and a seed of their own: the test rows of all reported splits are in no part of
it. Refused: Optuna. Its samplers and pruners serve large spaces and asynchronous trials; for a grid of some ten values
that train as jobs of a plan, it would need as much code as stands here, a database, and eight more packages.
Runs go through `train_all`, as the searches of studies do; a study tries the whole grid, because its paper did.
"""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.errors import RunError
from ..core.io import read_json, write_json
from .plan import Combination, Job, Plan, ShouldStop

if TYPE_CHECKING:
    from ..core.settings import Settings
    from ..data import Federation
    from ..runs.result import Result
    from .runner import ProgressDisplay

LR_FACTORS = tuple(3 ** (k / 2) for k in range(-4, 7))
"""Learning rates relative to the given one: from a ninth to 27 times it, on a log scale.

More of them are larger, because early stopping ends what overfits, and typed rates are careful ones.
"""
FRACTIONS = (1 / 9, 1 / 3, 1.0)
"""Share of the rounds in each step of the halving."""
MIN_ROUNDS = 3
"""Minimum number of rounds of a step."""
TUNING_VALIDATION = 0.25
"""Share of a client's rows outside the test part that choose; small parts would choose by chance."""
TUNING_STREAM = 7_919
"""Number of the tuning split, and difference of its seed from the seeds reported."""
TUNING_FOLDER, LOG_FILE = "tuning", "log.json"


@dataclass(frozen=True)
class Tuning:
    """The outcome of tuning: each method's choice, and the number of combinations tried.

    `is_at_edge` names methods whose learning rate is the smallest or largest one tried. `scores` are those of the
    choices, the larger the better, and `best_rounds` the rounds at which their validation curves are best.
    """

    budget: int
    choices: Mapping[str, Combination]
    n_tried: Mapping[str, int]
    is_at_edge: Sequence[str]
    scores: Mapping[str, float]
    best_rounds: Mapping[str, int]

    def write_notes(self) -> list[str]:
        """Say what was chosen, and where the space ended."""
        chosen = "; ".join(f"{name} {one.describe()}" for name, one in self.choices.items())
        notes = [
            f"tuned by validation data on a split and a seed of their own, with a budget of {self.budget} "
            f"run{'s' * (self.budget > 1)} for each method: {chosen}"
        ]
        if self.is_at_edge:
            notes.append(
                f"{', '.join(self.is_at_edge)}: the best learning rate is at the end of the grid; give another --lr "
                "to move the grid"
            )
        return notes


def list_combinations(method: str, lr: float, limit: int, seed: int, fixed: Mapping[str, Any]) -> list[Combination]:
    """List the combinations of a method to try: first the given one, then others drawn from the grid.

    Learning rates take turns, so that few combinations spread over all of the grid. `fixed` options are not tuned.
    """
    from ..algorithms import ALGORITHMS
    from ..algorithms.table import METHODS
    from ..core.options import list_options

    tunable = METHODS[method].tune if method in METHODS else {}  # of a custom method, the learning rate
    space = {key: values for key, values in tunable.items() if key not in fixed}
    grid = [
        Combination(lr * factor, dict(zip(space, values, strict=True)))
        for factor in LR_FACTORS
        for values in itertools.product(*space.values())
    ]
    factory = ALGORITHMS.get(method)
    options = list_options(factory) if factory else ()
    defaults = {option.name: option.default for option in options if option.name in space}
    others = [one for one in grid if not (math.isclose(one.lr, lr) and dict(one.options) == defaults)]
    order = np.random.default_rng([seed, TUNING_STREAM]).permutation(len(others))
    by_lr: dict[float, list[Combination]] = {}
    for i in order:
        by_lr.setdefault(others[i].lr, []).append(others[i])
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_lr.values()))
    return [Combination(lr, {}), *(one for one in in_turn if one is not None)][:limit]


def plan_steps(n_combinations: int, budget: int, rounds: int, *, choose_only: bool = False) -> list[tuple[int, int]]:
    """Plan the halving: for each step, the number of combinations and of rounds.

    A step with as many rounds as the one before would repeat it. With `choose_only`, no step has a single combination.
    """
    steps: list[tuple[int, int]] = []
    n = n_combinations
    for fraction in FRACTIONS:
        n = max(1, min(n, int(budget / len(FRACTIONS) / fraction + 1e-9)))
        length = min(rounds, max(MIN_ROUNDS, round(fraction * rounds)))
        if not (steps and steps[-1][1] == length) and not (choose_only and n == 1):
            steps.append((n, length))
    return steps


class Cost(NamedTuple):
    """The runs that tuning one method takes, and how many full runs these are."""

    runs: int
    full_runs: float


def count_cost(budget: int, rounds: int, *, choose_only: bool = False) -> Cost:
    """Count the runs for tuning one method with all combinations that the budget allows."""
    steps = plan_steps(3 * budget, budget, rounds, choose_only=choose_only)
    return Cost(sum(n for n, _ in steps), sum(n * length for n, length in steps) / rounds)


def make_tuning_split(federations: "Sequence[Federation]", seed: int) -> "Federation":
    """Divide the rows that no reported split tests anew, with a larger validation part.

    Where time decides the parts, the newest of these rows are for validation. Clients without such rows are left out.
    """
    from ..data.client_index import Client, ClientIndex
    from ..data.splits import draw_groups

    federation, clients = federations[0], []
    for i, client in enumerate(federation.clients):
        tested = np.concatenate([one.clients[i].test for one in federations])
        rows = np.concatenate([client.train, client.validation])
        rows = rows[~np.isin(rows, tested)]
        if not len(rows):
            continue
        shuffled = np.random.default_rng([seed, i, TUNING_STREAM]).permutation(rows)
        order = rows[::-1] if "time_column" in federation.partition else shuffled  # from new to old, or by chance
        n = min(max(1, round(TUNING_VALIDATION * len(rows))), len(rows) - 1)
        validation, train = order[:n], order[n:]
        if federation.groups is not None:
            groups, random = federation.groups[rows], np.random.default_rng([seed, i, TUNING_STREAM])
            validation, train = (rows[one] for one in draw_groups(groups, np.zeros_like(groups), n, random))
        if len(train):
            clients.append(Client(client.name, np.sort(train), np.sort(validation), client.test))
    if len(clients) < 2:
        raise RunError(
            f"tuning: the {len(federations)} splits leave rows without a test to {len(clients)} clients; give fewer "
            "--splits, tune with one split, or leave --tune to --budget"
        )
    # Each client has a validation part here, unless its rows are of one group; none has it by chance.
    fractions = {k: v for k, v in federation.partition.get("fractions", {}).items() if k != "validation"}
    partition = {**federation.partition, "fractions": fractions, "split": TUNING_STREAM}
    return replace(federation, clients=ClientIndex.from_clients(clients), partition=partition)


def tune_plan(
    plan: Plan,
    budget: int,
    out: Path,
    should_stop: ShouldStop,
    display: "ProgressDisplay",
    processes: Any = "auto",
    *,
    label: str = "",
    keep_going: bool = False,
    choose_only: bool = False,
) -> Tuning:
    """Choose learning rate and options of every method of a plan; what was begun before goes on.

    Args:
        label: distinguishes several tunings in one folder.
        keep_going: a method that diverges with every combination has the lowest rate, where an error ends all else.
        choose_only: train no combination any further once it is chosen; scores are then not of all rounds.
    """
    suffix = f"-{label}" if label else ""
    folder = out / TUNING_FOLDER
    chosen_file = folder / f"chosen{suffix}.json"
    if chosen_file.exists():
        content = read_json(chosen_file)
        choices = {name: Combination(one["lr"], one["options"]) for name, one in content["choices"].items()}
        scores = {name: -math.inf if one is None else one for name, one in content["scores"].items()}
        return Tuning(**{**content, "choices": choices, "scores": scores})
    from ..training.setup import hold_out_newcomers
    from .runner import train_all

    experiment, rounds = plan.experiment, plan.experiment.rounds
    training = [hold_out_newcomers(one, experiment)[0] for one in plan.federations]
    federation = make_tuning_split(training, experiment.seed)
    left = {
        name: list_combinations(name, experiment.training.lr, 3 * budget, experiment.seed, plan.options[name])
        for name in plan.algorithms
    }
    n_tried = {name: len(each) for name, each in left.items()}
    log: dict[str, list[dict[str, Any]]] = {name: [] for name in left}
    scores, best_rounds = dict.fromkeys(left, -math.inf), dict[tuple[str, str], int]()
    for step in range(len(FRACTIONS)):
        jobs: list[tuple[str, Combination, Job]] = []
        for name, combinations in left.items():
            steps = plan_steps(n_tried[name], budget, rounds, choose_only=choose_only)
            if step >= len(steps):
                continue
            n, length = steps[step]
            jobs += [
                (name, one, _make_job(plan, federation, name, one, length, folder / f"{name}{suffix}" / f"{step}-{i}"))
                for i, one in enumerate(combinations[:n])
            ]
        if not jobs:
            break
        results, _ = train_all([job for *_, job in jobs], should_stop, display, scratch=out, processes=processes)
        by_folder = {result.folder: result for result in results}
        scored: dict[str, list[tuple[float, Combination]]] = {}
        for name, one, job in jobs:
            score = _score(by_folder.get(job.folder), plan)
            scored.setdefault(name, []).append((score, one))
            if result := by_folder.get(job.folder):
                best_rounds[name, one.describe()] = (result.best_validation or {}).get("round", 0)
            trial = {"rounds": job.settings.rounds, "lr": one.lr, **one.options}
            log[name].append(trial | {"score": None if math.isinf(score) else score})
        for name, each in scored.items():
            left[name] = [one for _, one in sorted(each, key=lambda pair: (-pair[0], pair[1].lr))]
            scores[name] = max(score for score, _ in each)
            if math.isinf(scores[name]) and not keep_going:
                raise RunError(f"tuning: training diverged with every combination of {name}; give a lower --lr")
    choices = {name: combinations[0] for name, combinations in left.items()}
    edges = [LR_FACTORS[0] * experiment.training.lr, LR_FACTORS[-1] * experiment.training.lr]
    at_edge = [name for name, one in choices.items() if any(math.isclose(one.lr, edge) for edge in edges)]
    rounds_of = {name: best_rounds.get((name, one.describe()), 0) for name, one in choices.items()}
    tuning = Tuning(budget, choices, n_tried, at_edge, scores, rounds_of)
    write_json(folder / f"log{suffix}.json", log)
    content = {**vars(tuning), "choices": {name: one._asdict() for name, one in choices.items()}}
    write_json(chosen_file, content)
    for path in folder.iterdir():
        if path.is_dir():  # the runs of the combinations; the log keeps their scores
            shutil.rmtree(path, ignore_errors=True)  # Windows keeps a store that is still open
    return tuning


def _make_job(plan: Plan, federation: "Federation", name: str, one: Combination, rounds: int, folder: Path) -> Job:
    """Make the job of one combination: on the tuning split, with a seed of its own, evaluated now and then."""
    seed = (plan.experiment.seed + TUNING_STREAM) % 2**32
    options = {**plan.options[name], **one.options}
    job = plan.make_job(name, seed, f"tuning {name}, {rounds} rounds, {one.describe()}", folder)
    settings = job.settings.replace(lr=one.lr, rounds=rounds, held_out=0, eval_every=max(1, rounds // 10))
    settings = settings.replace(**_suit_clients(settings, federation))
    if not plan.federation.part("validation").sizes.any():  # what is reported cannot stop early either
        settings = settings.replace(early_stopping="off")
    algorithm = plan.build_method(name, options)
    return replace(job, algorithm=algorithm, federation=federation, options=options, settings=settings)


def _suit_clients(settings: "Settings", federation: "Federation") -> dict[str, Any]:
    """Suit settings that count or name clients to those that have rows for tuning."""
    n, changes = federation.n_clients, dict[str, Any]()
    cohort, attack, robust = settings.participation.cohort, settings.attack, settings.defence.robust
    if isinstance(cohort, int):
        changes["cohort"] = min(cohort, n)
    if attack is not None and isinstance(attack.attackers, int):
        changes["attackers"] = min(attack.attackers, n - 1)
    if robust is not None and robust.trusted is not None:
        names = [name.strip() for name in robust.trusted.split(",")]
        changes["trusted"] = ",".join(name for name in names if name in federation.names) or robust.trusted
    return changes


def _score(result: "Result | None", plan: Plan) -> float:
    """Score a run by validation data; minus infinity for a run that diverged."""
    from ..analysis.verdict import score_methods

    if result is None or plan.metric is None:
        return -math.inf
    choice = score_methods({"run": [result]}, [result], plan.metric)
    score = choice.scores["run"]
    return score if choice.n_validated and math.isfinite(score) else -math.inf
