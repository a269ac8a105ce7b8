"""What the pictures of a report show, from the runs' stores."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..clusters import Arranged, arranged
from ..compare import ALONE, gains
from ..numbers import Numbers
from ..relations import Relations, seriation, thinned
from .frames import frames

MOST_SHOWN = 150
"""Clients in the pictures of who learns from whom; more could not be told apart."""
MOST_POINTS = 400
"""Points of a curve."""
MOST_CELLS = 6_000_000
"""Bytes of mixing matrices before they are compressed; halved until the page is small enough."""
PARTNERS = 3


def curves(groups: dict[str, list[Numbers]]) -> list[dict[str, Any]]:
    """Of each method and seed: rounds, bytes and seconds so far, mean and worst-tenth accuracy."""
    found = []
    for name, runs in groups.items():
        seeds = []
        for run in runs:
            history = [entry for entry in run.history if entry[run.headline]]
            picked = thinned(range(len(history)), MOST_POINTS)
            entries = [history[i] for i in picked]
            seeds.append(
                {
                    "seed": run.settings.seed,
                    "rounds": [e["round"] for e in entries],
                    "bytes": [e["bytes"]["up"] + e["bytes"]["down"] for e in entries],
                    "seconds": [round(e["seconds"], 2) for e in entries],
                    "mean": [_percent(e[run.headline]["acc_uniform"]) for e in entries],
                    "worst": [_percent(e[run.headline]["acc_worst10"]) for e in entries],
                }
            )
        found.append({"method": name, "point": runs[0].headline, "seeds": seeds})
    return found


def clients(groups: dict[str, list[Numbers]], relations: dict[str, Relations]) -> dict[str, Any]:
    """Every client: samples, classes; with each method, accuracy before and after training, and partners."""
    first = next(iter(groups.values()))[0]
    labels = first.facts.get("labels")
    methods: dict[str, Any] = {}
    for name, runs in groups.items():
        at: dict[str, Any] = {
            point: [_percent(a) for a in _accuracy(runs, point)] for point in ("received", "trained")
        }
        at["headline"] = at[runs[0].headline]
        gain = None if name == ALONE else gains(groups, name)
        at["gain"] = None if gain is None else [_percent(g) for g in gain]
        if name in relations and relations[name].mixes:
            at |= _partners(relations[name])
        methods[name] = at
    return {
        "ids": [client.id for client in first.clients],
        "train": [client.n_train for client in first.clients],
        "test": [client.n_test for client in first.clients],
        "classes": None if labels is None else [sum(1 for n in row if n) for row in labels],
        "methods": methods,
    }


def _partners(relations: Relations) -> dict[str, Any]:
    """Of each client the weight of its own model, and whose it was given most of, by the mean over components."""
    mean, names = relations.mean, relations.names
    own = [_percent(float(w)) for w in np.diag(mean)]
    partners = []
    for i, row in enumerate(mean):
        others = [int(k) for k in np.argsort(-np.nan_to_num(row)) if k != i][:PARTNERS]
        partners.append([[names[k], _percent(float(row[k]))] for k in others if row[k] > 1e-4])
    at = {place: i for i, place in enumerate(relations.places)}
    everyone = [at.get(i) for i in range(len(relations.run.facts["clients"]))]
    return {
        "own": [None if i is None else own[i] for i in everyone],
        "partners": [[] if i is None else partners[i] for i in everyone],
    }


def _accuracy(runs: Sequence[Numbers], point: str) -> list[float | None]:
    """Test accuracy per client at one point, averaged over the seeds that have it."""
    rows = zip(*([getattr(client, point) for client in run.clients] for run in runs), strict=True)
    known = [[a for a in row if a is not None] for row in rows]
    return [float(np.mean(row)) if row else None for row in known]


def mixing(relations: dict[str, Relations], cells: int) -> tuple[dict[str, Any], bytes]:
    """Who learns from whom, with every method that mixes client by client; and its matrices, `cells` bytes at most."""
    mixed = {name: one for name, one in relations.items() if one.mixes}
    if not mixed:
        return {}, b""
    first = next(iter(mixed.values()))
    n = len(first.names)
    shown = thinned(seriation(first.mean)[0], MOST_SHOWN) if n > MOST_SHOWN else list(range(n))
    shown.sort()
    square = np.ix_(shown, shown)
    matrices = sum(len(one.last) for one in mixed.values())
    most = max(2, cells // (matrices * len(shown) ** 2))
    content, methods = b"", {}
    similarity = first.similarity
    for name, one in mixed.items():
        packed = frames(one, shown, most, len(content))
        content += packed.content
        found = arranged(one.mean[square], one.offered[square])
        methods[name] = {
            **packed.about,
            "order": found.order,
            "clusters": _numbered(found),
            "all_rounds": len(one.rounds),
            "own": {component: float(np.nanmean(np.diag(matrix))) for component, matrix in one.last.items()},
            "agreement": {
                component: {"correlation": a.correlation, "share": a.share, "chance": a.chance}
                for component, a in one.agreement().items()
            },
        }
    return {
        "clients": [first.places[i] for i in shown],
        "hidden": len(first.run.facts["clients"]) - len(shown),
        "labels": None if first.labels is None else first.labels[shown].astype(int).tolist(),
        "classes": list(first.run.facts["classes"]),
        "label_order": None if similarity is None else seriation(similarity[square])[0],
        "methods": methods,
    }, content


def _numbered(found: Arranged) -> list[int]:
    """The cluster of each client from 1, in their order; 0 of one that is in none."""
    sizes = Counter(found.clusters)
    several = [c for c in dict.fromkeys(found.clusters[i] for i in found.order) if sizes[c] > 1]
    if found.kept is None:
        return [0] * len(found.clusters)
    return [several.index(c) + 1 if c in several else 0 for c in found.clusters]


def traffic(groups: dict[str, list[Numbers]]) -> dict[str, Any]:
    """Bytes up and down by layer with each method, averaged over the seeds; rounds done."""
    found = {}
    for name, runs in groups.items():
        each = [run.store.traffic() for run in runs]
        parts = list(dict.fromkeys(part for one in each for way in one.values() for part in way))
        found[name] = {
            "parts": parts,
            "rounds": runs[0].rounds,
            **{
                way: [float(np.mean([e[way].get(p, 0) for e in each])) for p in parts]
                for way in ("up", "down")
            },
            "total": [
                float(np.mean([r.bytes_up for r in runs])),
                float(np.mean([r.bytes_down for r in runs])),
            ],
        }
    return found


def _percent(value: float | None) -> float | None:
    """Percent with two decimals; None for what is not known."""
    return None if value is None or np.isnan(value) else round(100 * value, 2)
