"""Remake the table of attacks: mean test accuracy of honest clients, with every method under every attack.

    python -m benchmarks robustness
    python -m benchmarks robustness --algorithms fedavg,ditto --attacks none,negated_model --accept better
    python -m benchmarks robustness --rules all

Settings of a run that are not listed (`--accept better`, `--screening off`) go to every run as they are. With
`--rules`, each row is a rule that acts alone, and a cell is the accuracy without attackers and under the worst attack.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml

import fedattune
from fedattune.algorithms import ALGORITHMS
from fedattune.core.algorithm import find_needed_sums
from fedattune.core.errors import ConfigError, DivergedError
from fedattune.core.settings import Settings
from fedattune.training.uploads import screening
from fedattune.training.uploads.adversary import sample_attackers
from fedattune.training.uploads.attacks import ATTACKS
from fedattune.training.uploads.robust import is_mixing

from .options import read_count, read_output_file

METHODS = ("local", "fedavg", "ditto", "pfedla", "scaffold", "attune", "fedmcsa", "fedrep")
VARIANTS = (
    "scaled_model:0.3", "against_mean:1", "against_mean@20", "against_mean@/2", "against_mean@-2",
    "head_against_mean:1", "head_against_mean@20", "steer:3",
)  # fmt: skip
"""Attacks of other strengths and schedules that the table has beside the defaults."""
NONE = "none"

SETTINGS: dict[str, Any] = {"rounds": 50, "lr": 0.05, "early_stopping": "off", "eval_every": 50}
"""Settings of every run. The models at the end of training count: by validation data, a client would choose the round
before an attack took hold."""

TRUSTED_CLIENTS = 4
"""Honest clients that the server trusts under the rule `trust`."""

NOTHING: dict[str, Any] = {"screening": "off", "accept": "always"}

RULES: dict[str, dict[str, Any]] = {
    "nothing": NOTHING,
    "default": {"screening": "groups", "accept": "harmless"},
    "screening groups": NOTHING | {"screening": "groups"},
    "screening on": NOTHING | {"screening": "on"},
    "accept harmless": NOTHING | {"accept": "harmless"},
    "accept better": NOTHING | {"accept": "better"},
    "max_weight 1": NOTHING | {"max_weight": 1.0},
    "median": NOTHING | {"robust": "median"},
    "trimmed_mean": NOTHING | {"robust": "trimmed_mean"},
    "geometric_median": NOTHING | {"robust": "geometric_median"},
    "multi_krum": NOTHING | {"robust": "multi_krum"},
    "trust": NOTHING | {"robust": "trust"},
    "rows": NOTHING | {"robust": "rows"},
    "max_share 0.1": NOTHING | {"max_share": 0.1},
}
"""rule -> settings with which it acts alone."""

Cells = dict[str, dict[str, list[dict[str, float | None]]]]
"""attack -> method -> for each split, the honest clients' `accuracy` (None: all clients diverged), and `success`."""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks robustness",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--algorithms", default=",".join(METHODS), help="methods, the columns (default: %(default)s)")
    add("--attacks", default=",".join((NONE, *ATTACKS, *VARIANTS)), help="attacks, the rows (default: all)")
    add("--attackers", type=read_count, default=4, help="number of attackers (default: %(default)s)")
    add("--clients", type=read_count, default=20, help="number of clients (default: %(default)s)")
    add("--data", default="digits", help="data (default: %(default)s)")
    add("--partition", default="dirichlet", help="partition of the data (default: %(default)s)")
    add("--model", default="dnn", help="model (default: %(default)s)")
    add("--splits", type=read_count, default=3, help="partitions with other seeds (default: %(default)s)")
    add("--first-split", type=int, default=0, help="seed of the first partition (default: %(default)s)")
    add("--rules", help=f"rules that act alone, the rows, or all: {', '.join(RULES)}")
    add("--clip", type=float, default=screening.CLIP, help="usual norms of a clipped layer (default: %(default)s)")
    add(
        "--evidence",
        type=float,
        default=screening.MAX_EVIDENCE,
        help="blame above which a client is rejected (default: %(default)s)",
    )
    add("--json", type=read_output_file, metavar="FILE", help="write the numbers of all splits to FILE")
    return parser


def read_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the other settings of every run, in pairs such as `--accept better`.

    Raises:
        SystemExit: a name has no value, or is no setting.
    """
    values = dict(SETTINGS)
    if len(arguments) % 2 or not all(name.startswith("--") for name in arguments[::2]):
        raise SystemExit(f"expected settings in pairs such as --accept better, got {' '.join(arguments)}")
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        values[name.removeprefix("--").replace("-", "_")] = yaml.safe_load(value)
    try:
        Settings.from_keywords(**values)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    return values


def measure(given: argparse.Namespace, settings: dict[str, Any]) -> Cells:
    """Train every method under every attack on every split."""
    methods, attacks = given.algorithms.split(","), given.attacks.split(",")
    cells: Cells = {attack: {method: [] for method in methods} for attack in attacks}
    for seed in range(given.first_split, given.first_split + given.splits):
        data = fedattune.load_federation(given.data, partition=given.partition, clients=given.clients, seed=seed)
        # Without an attack, the same clients count.
        attackers = sample_attackers(Settings(attack="free_rider", attackers=given.attackers), data)
        for attack in attacks:
            attacked = {} if attack == NONE else {"attack": attack, "attackers": given.attackers}
            for method in methods:
                cell: dict[str, float | None] = {"accuracy": None}
                more = dict(settings)
                if more.get("robust") == "trust":
                    honest = [name for i, name in enumerate(data.names) if i not in attackers]
                    more.setdefault("trusted", ",".join(honest[:TRUSTED_CLIENTS]))
                try:
                    result = fedattune.fit(data, method, given.model, **more, **attacked)
                    is_honest = ~np.isin(result.eval_ids, attackers)
                    cell["accuracy"] = float(np.nanmean(result.measure_clients("accuracy")[is_honest]))
                    if "success" in result.reports.get("attack", {}):
                        cell["success"] = result.reports["attack"]["success"]
                except DivergedError:
                    pass
                cells[attack][method].append(cell)
    return cells


def write_table(cells: Cells) -> str:
    """Write the table in Markdown: accuracies in percent, and in brackets the success of a trigger."""
    methods = list(next(iter(cells.values())))
    lines = [" | ".join(["| attack", *methods]) + " |", "|---" * (len(methods) + 1) + "|"]
    for attack, row in cells.items():
        lines.append(" | ".join([f"| {attack}", *(_write_cell(row[method]) for method in methods)]) + " |")
    return "\n".join(lines)


def _write_cell(splits: Sequence[dict[str, float | None]]) -> str:
    known = [one["accuracy"] for one in splits if one["accuracy"] is not None]
    if not known:
        return "all diverge"
    text = f"{100 * float(np.mean(known)):.1f}"
    if len(known) < len(splits):
        text += f" ({len(splits) - len(known)} of {len(splits)} diverge)"
    successes = [one["success"] for one in splits if one.get("success") is not None]
    return text + (f" ({100 * float(np.mean(successes)):.0f})" if successes else "")


def can_act(rule: str, method: str) -> bool:
    """Tell whether a rule does anything for a method."""
    settings, server = RULES[rule], ALGORITHMS[method]().server
    if "max_share" in settings or settings.get("robust") == "rows":
        return is_mixing(server)
    return "robust" not in settings or find_needed_sums(server) is not None


def measure_rules(given: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Cells]:
    """Measure every rule alone, with the methods for which it does anything.

    Raises:
        SystemExit: there is no such rule.
    """
    rules = list(RULES) if given.rules == "all" else given.rules.split(",")
    if unknown := [rule for rule in rules if rule not in RULES]:
        raise SystemExit(f"rules: no rule is called {unknown[0]!r}; expected all, or some of: {', '.join(RULES)}")
    found = {}
    for rule in rules:
        methods = [method for method in given.algorithms.split(",") if can_act(rule, method)]
        if methods:
            narrowed = argparse.Namespace(**{**vars(given), "algorithms": ",".join(methods)})
            found[rule] = measure(narrowed, {**settings, **RULES[rule]})
    return found


def write_rules(found: dict[str, Cells]) -> str:
    """Write the table in Markdown: without attackers, and under the attack that costs most."""
    methods = list(dict.fromkeys(method for cells in found.values() for method in next(iter(cells.values()))))
    lines = [" | ".join(["| alone", *methods]) + " |", "|---" * (len(methods) + 1) + "|"]
    for rule, cells in found.items():
        lines.append(" | ".join([f"| {rule}", *(_write_worst(cells, method) for method in methods)]) + " |")
    return "\n".join(lines)


def _write_worst(cells: Cells, method: str) -> str:
    if method not in next(iter(cells.values())):
        return ""
    # A run in which all clients diverge counts as no accuracy at all.
    means = {attack: float(np.mean([one["accuracy"] or 0.0 for one in row[method]])) for attack, row in cells.items()}
    honest = f"{100 * means.pop(NONE):.1f}, " if NONE in means else ""
    worst = min(means, key=lambda attack: means[attack])
    return f"{honest}{100 * means[worst]:.1f} ({worst})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    given, others = make_parser().parse_known_args(arguments)
    settings = read_settings(others)
    screening.CLIP, screening.MAX_EVIDENCE = given.clip, given.evidence
    started = time.perf_counter()
    cells: Any = measure_rules(given, settings) if given.rules else measure(given, settings)
    print(write_rules(cells) if given.rules else write_table(cells))
    about = {key: value for key, value in vars(given).items() if key != "json"}
    print(f"\n{json.dumps(about | settings)}; {time.perf_counter() - started:.0f} s")
    if given.json:
        given.json.write_text(json.dumps({"command": about, "settings": settings, "cells": cells}, indent=1), "utf-8")
    return 0
