"""What the pictures of a report show, from the runs' stores.

Mixing matrices made small: as many rounds as a budget allows, one byte a weight.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...training.metrics import RunMetrics
from ..clusters import Arrangement, arrange_clients
from ..compare import BASELINE, compute_gains
from ..relations import FloatArray, MixingAnalysis, seriate, thin_out

MAX_LEVEL, UNKNOWN_LEVEL = 254, 255


def pack_weights(weights: FloatArray, largest: float, signed: bool) -> bytes:
    """Weights (N, N), each as one byte: the fourth root of its share of the largest, UNKNOWN where not known.

    So large weights are exact to about a hundredth of themselves, those of a hundredth of the largest to three, and
    those of a millionth can still be told from zero. Signed ones have their zero in the middle.
    """
    root = (np.abs(np.nan_to_num(weights)) / largest) ** 0.25
    levels = MAX_LEVEL // 2 * (1 + np.sign(np.nan_to_num(weights)) * root) if signed else MAX_LEVEL * root
    out = np.round(levels).clip(0, MAX_LEVEL).astype(np.uint8)
    out[np.isnan(weights)] = UNKNOWN_LEVEL
    return out.tobytes()


@dataclass
class PackedMatrices:
    """Packed matrices of one run: `about` says where in the bytes each component of each round begins."""

    about: dict[str, Any]
    content: bytes


def pack_matrices(relations: MixingAnalysis, shown: Sequence[int], most: int, start: int) -> PackedMatrices:
    """The matrices among the `shown` clients of at most `most` rounds; `start`: the bytes before them.

    Where a client was given nothing in a round, its last row before stands.
    """
    rounds = thin_out(relations.rounds, most)
    square = np.ix_(shown, shown)
    stack = [{name: m[square] for name, m in relations.known(r).items()} for r in rounds]
    components = list(stack[-1]) if stack else []
    content, largest, signed = b"", {}, {}
    for name in components:
        series = np.stack([one.get(name, np.full((len(shown),) * 2, np.nan)) for one in stack])
        known = series[~np.isnan(series)]
        largest[name] = float(np.abs(known).max()) or 1.0 if len(known) else 1.0
        signed[name] = bool(len(known) and known.min() < 0)
        content += b"".join(pack_weights(one, largest[name], signed[name]) for one in series)
    about = {
        "components": [{"name": n, "largest": largest[n], "signed": signed[n]} for n in components],
        "rounds": rounds,
        "start": start,
    }
    return PackedMatrices(about, content)


MAX_PICTURED_CLIENTS = 150
"""Clients in the pictures of who learns from whom; more could not be told apart."""


MAX_CURVE_POINTS = 400
"""Points of a curve."""


MAX_MATRIX_BYTES = 6_000_000
"""Bytes of mixing matrices before they are compressed; halved until the page is small enough."""


N_LISTED_PARTNERS = 3


def build_curves(groups: dict[str, list[RunMetrics]]) -> list[dict[str, Any]]:
    """Of each method and seed: rounds, bytes and seconds so far, mean and worst-tenth accuracy."""
    found = []
    for name, runs in groups.items():
        seeds = []
        for run in runs:
            history = [entry for entry in run.history if entry[run.headline]]
            picked = thin_out(range(len(history)), MAX_CURVE_POINTS)
            entries = [history[i] for i in picked]
            seeds.append(
                {
                    "seed": run.settings.seed,
                    "rounds": [e["round"] for e in entries],
                    "bytes": [e["bytes"]["up"] + e["bytes"]["down"] for e in entries],
                    "seconds": [round(e["seconds"], 2) for e in entries],
                    "mean": [_round_percent(e[run.headline]["acc_uniform"]) for e in entries],
                    "worst": [_round_percent(e[run.headline]["acc_worst10"]) for e in entries],
                }
            )
        found.append({"method": name, "point": runs[0].headline, "seeds": seeds})
    return found


def build_clients(
    groups: dict[str, list[RunMetrics]], relations: dict[str, MixingAnalysis]
) -> dict[str, Any]:
    """Every client: samples, classes; with each method, accuracy before and after training, and partners."""
    first = next(iter(groups.values()))[0]
    labels = first.facts.get("labels")
    methods: dict[str, Any] = {}
    for name, runs in groups.items():
        at: dict[str, Any] = {
            point: [_round_percent(a) for a in _mean_accuracies(runs, point)]
            for point in ("received", "trained")
        }
        at["headline"] = at[runs[0].headline]
        gain = None if name == BASELINE else compute_gains(groups, name)
        at["gain"] = None if gain is None else [_round_percent(g) for g in gain]
        if name in relations and relations[name].mixes:
            at |= _list_partners(relations[name])
        methods[name] = at
    return {
        "ids": [client.id for client in first.clients],
        "train": [client.n_train for client in first.clients],
        "test": [client.n_test for client in first.clients],
        "classes": None if labels is None else [sum(1 for n in row if n) for row in labels],
        "methods": methods,
    }


def _list_partners(relations: MixingAnalysis) -> dict[str, Any]:
    """Of each client the weight of its own model, and whose it was given most of, by the mean over components."""
    mean, names = relations.mean, relations.names
    own = [_round_percent(float(w)) for w in np.diag(mean)]
    partners = []
    for i, row in enumerate(mean):
        others = [int(k) for k in np.argsort(-np.nan_to_num(row)) if k != i][:N_LISTED_PARTNERS]
        partners.append([[names[k], _round_percent(float(row[k]))] for k in others if row[k] > 1e-4])
    at = {place: i for i, place in enumerate(relations.places)}
    everyone = [at.get(i) for i in range(len(relations.run.facts["clients"]))]
    return {
        "own": [None if i is None else own[i] for i in everyone],
        "partners": [[] if i is None else partners[i] for i in everyone],
    }


def _mean_accuracies(runs: Sequence[RunMetrics], point: str) -> list[float | None]:
    """Test accuracy per client at one point, averaged over the seeds that have it."""
    rows = zip(*([getattr(client, point) for client in run.clients] for run in runs), strict=True)
    known = [[a for a in row if a is not None] for row in rows]
    return [float(np.mean(row)) if row else None for row in known]


def build_mixing(relations: dict[str, MixingAnalysis], cells: int) -> tuple[dict[str, Any], bytes]:
    """Who learns from whom, with every method that mixes client by client; and its matrices, `cells` bytes at most."""
    mixed = {name: one for name, one in relations.items() if one.mixes}
    if not mixed:
        return {}, b""
    first = next(iter(mixed.values()))
    n = len(first.names)
    shown = (
        thin_out(seriate(first.mean)[0], MAX_PICTURED_CLIENTS) if n > MAX_PICTURED_CLIENTS else list(range(n))
    )
    shown.sort()
    square = np.ix_(shown, shown)
    matrices = sum(len(one.last) for one in mixed.values())
    most = max(2, cells // (matrices * len(shown) ** 2))
    content, methods = b"", {}
    similarity = first.similarity
    for name, one in mixed.items():
        packed = pack_matrices(one, shown, most, len(content))
        content += packed.content
        found = arrange_clients(one.mean[square], one.offered[square])
        methods[name] = {
            **packed.about,
            "order": found.order,
            "clusters": _number_clusters(found),
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
        "label_order": None if similarity is None else seriate(similarity[square])[0],
        "methods": methods,
    }, content


def _number_clusters(found: Arrangement) -> list[int]:
    """The cluster of each client from 1, in their order; 0 of one that is in none."""
    sizes = Counter(found.clusters)
    several = [c for c in dict.fromkeys(found.clusters[i] for i in found.order) if sizes[c] > 1]
    if found.kept is None:
        return [0] * len(found.clusters)
    return [several.index(c) + 1 if c in several else 0 for c in found.clusters]


def build_traffic(groups: dict[str, list[RunMetrics]]) -> dict[str, Any]:
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


def _round_percent(value: float | None) -> float | None:
    """Percent with two decimals; None for what is not known."""
    return None if value is None or np.isnan(value) else round(100 * value, 2)
