"""The figure of what travelled: bytes by layer and direction."""

from collections.abc import Sequence
from typing import Any

from ..compare import by_algorithm
from ..errors import RunError
from ..numbers import Numbers
from .figure_style import COLOURS, COLUMN, HATCHES, Drawn, new_figure

MOST_PARTS = 8
"""Layers that get a colour of their own in the bytes; of more, the smallest are taken together."""
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_WHOLE, _REST = "all of it", "other layers"


def traffic(runs: Sequence[Numbers], width: float | None = None) -> Drawn:
    """Bytes that all clients sent and were sent, by layer, a pair of bars for each method; means over the seeds.

    Raises:
        RunError: nothing was sent.

    """
    groups = by_algorithm(runs)
    found = {name: _traffic(group) for name, group in groups.items()}
    sent = {name: ways for name, ways in found.items() if any(sum(parts.values()) for parts in ways.values())}
    if not sent:
        raise RunError(f"nothing was sent in these runs ({', '.join(groups)}), so there are no bytes to draw")
    names = _parts([parts for ways in sent.values() for parts in ways.values()])
    scale, unit = unit_of(max(sum(parts.values()) for ways in sent.values() for parts in ways.values()))
    width = width or COLUMN
    legend_rows = -(-len(names) // max(1, round(1.2 * width)))
    figure = new_figure(width, 0.55 + 0.36 * len(sent) + 0.17 * (legend_rows + 1))
    axes = figure.add_subplot()
    places, ticks = [], []
    for row, (name, ways) in enumerate(sent.items()):
        for k, way in enumerate(("up", "down")):
            place, left = row + 0.19 * (2 * k - 1), 0.0
            places.append(place)
            ticks.append(f"{name}  {way}" if k == 0 else way)
            known = [part for part in names if part in ways[way]]
            sizes = {part: ways[way][part] for part in known}
            if rest := sum(ways[way].values()) - sum(sizes.values()):
                sizes[_REST] = rest
            for part, size in sizes.items():
                axes.barh(place, size / scale, 0.34, left=left, label=part, **_fill(names, part))
                left += size / scale
    axes.set_yticks(places, ticks)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(sent) - 0.5, -0.5)
    axes.set_xlabel(f"All clients and rounds ({unit})")
    axes.grid(visible=True, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    once = {part: handles[labels.index(part)] for part in [*names, _REST] if part in labels}
    if set(once) != {_WHOLE}:
        across = max(1, min(round(1.2 * width), len(once)))
        figure.legend(
            once.values(),
            once.keys(),
            loc="outside lower center",
            ncols=across,
            handlelength=1.4,
            title="Layer",
        )
    none = [name for name in groups if name not in sent]
    said = f"; nothing was sent by {', '.join(none)}" if none else ""
    old = [name for name in sent if _WHOLE in sent[name]["up"] or _WHOLE in sent[name]["down"]]
    said += f"; not stored by layer: {', '.join(old)}" if old else ""
    return Drawn(figure, f"Bytes that all clients sent (up) and were sent (down), by layer{said}")


def unit_of(largest: float) -> tuple[float, str]:
    """The largest unit of bytes that is not above a number, and its name."""
    return next((pair for pair in UNITS if largest >= pair[0]), UNITS[-1])


def _traffic(runs: Sequence[Numbers]) -> dict[str, dict[str, float]]:
    """Direction -> layer -> bytes, the mean over seeds; older runs know only how much it was in all."""
    out: dict[str, dict[str, float]] = {"up": {}, "down": {}}
    for run in runs:
        stored = run.store.traffic()
        for way, total in (("up", run.bytes_up), ("down", run.bytes_down)):
            parts = stored[way] if any(stored.values()) else {_WHOLE: total} if total else {}
            for part, size in parts.items():
                out[way][part] = out[way].get(part, 0) + size / len(runs)
    return out


def _parts(found: Sequence[dict[str, float]]) -> list[str]:
    """The layers that get a colour: all, or of many the largest; in the order in which they are stored."""
    largest: dict[str, float] = {}
    for parts in found:
        for part, size in parts.items():
            largest[part] = max(largest.get(part, 0.0), size)
    if len(largest) <= MOST_PARTS:
        return list(largest)
    kept = sorted(largest, key=lambda part: -largest[part])[: MOST_PARTS - 1]
    return [part for part in largest if part in kept]


def _fill(names: Sequence[str], part: str) -> dict[str, Any]:
    place = names.index(part) if part in names else MOST_PARTS - 1
    return {
        "facecolor": COLOURS[place],
        "hatch": HATCHES[place],
        "edgecolor": "white",
        "linewidth": 0.4,
    }
