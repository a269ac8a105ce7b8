"""Folders of runs that were never trained, with scores, matrices and bytes that a test has chosen."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedattune import Settings
from fedattune.analysis.folder import make_run_name, seal_experiment
from fedattune.core.io import write_json
from fedattune.core.payload import MixingMatrices
from fedattune.engine.base import Scores
from fedattune.runs.folder import CHECKSUM_FILE, RunFolder, read_checksums, set_checksums
from fedattune.runs.store import RoundRecord, RunStore

Rows = Sequence[Sequence[float]]
Mixed = tuple[Sequence[int], Sequence[int], Mapping[str, Rows]]  # rows, columns, component -> weights


def craft(
    folder: Path,
    algorithm: str,
    correct: Mapping[int, Sequence[int]],
    *,
    n_test: Sequence[int] = (10, 20, 10, 40),
    seed: int = 0,
    number: int = 0,
    labels: Rows | None = None,
    mixing: Mapping[int, Mixed] | None = None,
    traffic: Mapping[str, Mapping[str, int]] | None = None,
    moved: int = 0,
    facts: Mapping[str, Any] | None = None,
    finished: bool = True,
    **config: Any,
) -> Path:
    """Write the run of clients a, b, c, ... with a `seed` and split `number` into its folder, and return `folder`."""
    path = folder / make_run_name(algorithm, number, seed)
    path.mkdir(parents=True)
    settings = Settings(rounds=max(correct), seed=seed).to_keywords(mode="json")
    about = {"algorithm": algorithm, "data": "made", "split": "s" + "'" * number, "partition": {"split": number}}
    write_json(path / "config.json", {**settings, **about, **config})
    clients = [
        {"id": chr(ord("a") + i), "n_train": 100 + i, "n_validation": 0, "n_test": n} for i, n in enumerate(n_test)
    ]
    told: dict[str, Any] = {"clients": clients, "evaluation_point": "trained", "notes": [], "weight_decay": 0.0}
    told |= ({} if labels is None else {"labels": labels}) | dict(facts or {})
    write_json(path / "facts.json", told)
    store = RunStore(path / "metrics.sqlite")
    ids = torch.tensor(told.get("numbers", range(len(n_test))))
    n = torch.tensor(n_test)
    for r in range(1, max(correct) + 1):
        store.add_round(RoundRecord(r, 2.0 * r, moved * r, moved * r, 5 * r * len(n_test), []))
    for r, right in correct.items():
        store.add_scores(r, "trained", "test", Scores(n, torch.tensor(right), torch.zeros(len(n_test))), ids)
    for r, (rows, columns, weights) in (mixing or {}).items():
        matrices = {name: torch.tensor(matrix) for name, matrix in weights.items()}
        store.add_mixing(r, MixingMatrices(torch.tensor(rows), torch.tensor(columns), matrices))
    store.set_traffic(traffic or {})
    store.commit()
    store.close()
    if finished:
        RunFolder(path).finish({"facts": told})
    return folder


def finish_comparison(folder: Path, failed: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the result of a comparison, with the runs that failed."""
    write_json(folder / "result.json", {"failed": list(failed)})
    seal_experiment(folder, is_finished=True)


def seal(folder: Path) -> None:
    """Write the checksums of a folder anew, as a stranger does who edits or removes its files."""
    for sums in folder.rglob(CHECKSUM_FILE):
        names = {"environment.json", *(read_checksums(sums.parent) or ())}
        set_checksums(sums.parent, [sums.parent / name for name in names])


ALL = (0, 1, 2, 3)
LABELS = [[10, 0], [10, 0], [0, 10], [0, 10]]  # a and b alike, c and d alike
EARLY = [[0.7, 0.1, 0.2, 0.0], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]]
LATE = [[0.5, 0.4, 0.1, 0.0], [0.4, 0.5, 0.0, 0.1], [0.1, 0.0, 0.5, 0.4], [0.0, 0.1, 0.4, 0.5]]
SAME = [[0.25] * 4] * 4


def compared(folder: Path) -> Path:
    """Local, fedavg and a method that mixes, with two seeds each; the mixing one is best."""
    for seed in (0, 1):
        craft(folder, "local", {2: (5, 10, 5, 20), 4: (5, 10, 5, 20)}, seed=seed, labels=LABELS)
        craft(
            folder,
            "fedavg",
            {2: (4, 9, 4, 20), 4: (4, 9, 4, 20)},
            seed=seed,
            labels=LABELS,
            mixing={r: (ALL, ALL, {"model": SAME}) for r in (2, 4)},
            traffic={"up": {"conv": 400}, "down": {"conv": 400}},
            moved=100,
        )
        craft(
            folder,
            "fedmcsa",
            {2: (5, 10, 5, 20), 4: (7 + seed, 12, 5, 19)},
            seed=seed,
            labels=LABELS,
            mixing={
                2: (ALL, ALL, {"fc.weight": EARLY, "fc.bias": SAME}),
                3: (ALL, ALL, {"fc.weight": LATE, "fc.bias": SAME}),
                4: (ALL, ALL, {"fc.weight": LATE, "fc.bias": SAME}),
            },
            traffic={"up": {"fc": 300, "conv": 100}, "down": {"fc": 300}},
            moved=100,
        )
    return folder


HALF = {1: (5, 10, 5, 20), 2: (5, 12, 5, 20)}
BETTER = {1: (6, 10, 5, 20), 2: (9, 12, 5, 20)}


def experiment(folder: Path, names: str = "local, fedavg", seeds: int = 1, budget: str = "off") -> Path:
    """Write an experiment of ten rounds that has not begun, and return `folder`."""
    folder.mkdir(exist_ok=True)
    lines = [f"algorithms: [{names}]", f"seeds: {seeds}", "seed: 0", "rounds: 10", f"budget: '{budget}'"]
    (folder / "experiment.yaml").write_text("\n".join(lines) + "\n")
    (folder / "command.txt").write_text("compare\n")
    return folder


def going(folder: Path, name: str, correct: dict[int, Any], **more: Any) -> Path:
    """Write a run that still trains."""
    return craft(folder, name, correct, finished=False, rounds=10, moved=500, definition="", **more)


HOSTILE = "\x1b[31m'\"></script></style><img src=x onerror=hit()><script>hit()</script>{{ 7 * 7 }}"


def craft_hostile(folder: Path) -> Path:
    """Runs of which every text is hostile: names, notes, classes, components, settings and versions."""
    clients: list[dict[str, Any]] = [
        {"id": f"{i}{HOSTILE}", "n_train": 9, "n_test": n} for i, n in enumerate((10, 20, 10, 40))
    ]
    facts: dict[str, Any] = {
        "clients": clients,
        "classes": [HOSTILE, f"other {HOSTILE}"],
        "notes": [HOSTILE],
        "data_notes": [f"data {HOSTILE}"],
        "effects": [[HOSTILE, HOSTILE, HOSTILE, 0.001]],
        "newcomers": [{**clients[0], "received": 0.1, "trained": 0.2, "local": 0.3}],
    }
    config: dict[str, Any] = {"data": HOSTILE, "definition": HOSTILE, "options": {HOSTILE: HOSTILE}, "model": HOSTILE}
    scores = {1: (5, 10, 5, 20), 2: (6, 12, 5, 20)}
    craft(folder, "local", scores, labels=LABELS, facts=facts, **config)
    name = f"m{HOSTILE}"
    mixing: dict[int, Mixed] = {r: (ALL, ALL, {HOSTILE: EARLY, "b": LATE}) for r in (1, 2)}
    traffic = {"up": {HOSTILE: 9}, "down": {}}
    craft(folder, "other", scores, labels=LABELS, facts=facts, mixing=mixing, traffic=traffic, **config)
    run = folder / "other" / "seed-0"
    settings = json.loads((run / "config.json").read_text("utf-8"))
    (run / "config.json").write_text(json.dumps({**settings, "algorithm": name}), "utf-8")
    environment = {"fedattune": HOSTILE, "platform": HOSTILE, "packages": {HOSTILE: HOSTILE}}
    (run / "environment.json").write_text(json.dumps(environment), "utf-8")
    (folder / "notes.json").write_text(json.dumps([f"tuned {HOSTILE}"]), "utf-8")
    seal(folder)
    return folder
