"""Does attention find the clients with the same labels? IGFL's matching rate."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ConfigError, did_you_mean
from .cells import Cell
from .records import Records
from .study import Study

if TYPE_CHECKING:
    from .outcome import Outcome

Matrix = np.ndarray[Any, Any]


def pairs_alike(labels: Matrix) -> Matrix:
    """Which ordered pairs (N, N) of different clients have a label in common, from label counts (N, K)."""
    has = np.asarray(labels) > 0
    alike = np.asarray((has[:, None] & has[None]).any(2))
    np.fill_diagonal(alike, False)
    return alike


def matching_rate(attention: Matrix, labels: Matrix) -> float | None:
    """Share of the pairs with a label in common that are among as many darkest cells off the diagonal.

    None where no two clients have one. The paper does not say how dark a cell must be; as many cells as there are
    such pairs are taken, so that 1 means that attention put exactly them first, and chance gives their share.
    Source: IGFL (Huang et al., 2021), figure 2 and its text.
    """
    alike = pairs_alike(labels)
    n = int(alike.sum())
    if not n:
        return None
    scores = np.where(np.eye(len(alike), dtype=bool), -np.inf, attention)
    darkest = np.argsort(-scores, axis=None, kind="stable")[:n]
    return float(alike.ravel()[darkest].mean())


def chance(labels: Matrix) -> float:
    """The matching rate of attention that knows nothing: the share of pairs with a label in common."""
    n = len(labels)
    return float(pairs_alike(labels).sum() / (n * (n - 1)))


def matching(records: Records, run: str, study: Study) -> float | None:
    """The matching rate of a run, from its attention averaged over the rounds."""
    matrix = records.mixing(run).get(("all", study.figure.component or "attention"))
    return None if matrix is None else matching_rate(matrix, np.array(records.runs[run]["labels"]))


def summary(study: Study, found: "Mapping[Cell, Outcome]", records: Records) -> list[list[str]]:
    """What the picture of mixing matrices shows, in numbers: a table with its head; empty for other studies.

    Raises:
        ConfigError: the runs have no matrices that such a picture could show.

    """
    kind = study.figure.kind
    if kind not in ("matching", "heat_map", "weights"):
        return []
    shown = [(cell, one) for cell, one in found.items() if one.runs and records.mixing(one.runs[0])]
    for cell, one in shown:
        _check(study, cell, records.mixing(one.runs[0]))
    if kind == "matching":
        lines = [["populations", "matching rate in %", "spread", "by chance", "number of populations"]]
        for cell, one in shown:
            known = [(run, rate) for run in one.runs if (rate := matching(records, run, study)) is not None]
            rates = [100 * rate for _, rate in known]
            by_chance = np.mean([chance(np.array(records.runs[run]["labels"])) for run, _ in known])
            lines.append(
                [
                    cell.column,
                    f"{np.mean(rates):.1f}",
                    f"{np.std(rates):.1f}",
                    f"{100 * by_chance:.1f}",
                    str(len(rates)),
                ]
            )
        return lines
    if kind == "heat_map":
        lines = [["data", "layer", "own", "3 labels in common", "2", "1", "none"]]
        for cell, one in shown:
            for layer, mixing in _last(records, one).items():
                has = np.array(records.runs[one.runs[0]]["labels"]) > 0
                overlap = (has[:, None] & has[None]).sum(2)
                np.fill_diagonal(overlap, -1)
                means = [
                    mixing[overlap == n].mean() if (overlap == n).any() else np.nan for n in (-1, 3, 2, 1, 0)
                ]
                lines.append([cell.column, layer, *("–" if np.isnan(m) else f"{m:.4f}" for m in means)])
        return lines
    lines = [["data", "layer", "target itself", "same labels", "all but one label", "others, mean"]]
    for cell, one in shown:
        for layer, mixing in _last(records, one).items():
            row = mixing[0]
            lines.append(
                [cell.column, layer, *(f"{w:.4f}" for w in (row[0], row[1], row[2], row[3:].mean()))]
            )
    return lines


def _check(study: Study, cell: Cell, mixing: Mapping[tuple[str, str], Matrix]) -> None:
    where, kind = f"{study.name}, {cell}: figure", study.figure.kind
    components = {component for _, component in mixing}
    wanted = study.figure.component or ("attention" if kind == "matching" else None)
    if wanted and wanted not in components:
        raise ConfigError(f"{where}: there is no component {wanted!r}; {did_you_mean(wanted, components)}")
    n = len(next(iter(mixing.values())))
    if kind == "weights" and n < 4:
        raise ConfigError(f"{where}: weights needs four clients or more, got {n}")


def over_seeds(records: Records, one: "Outcome") -> dict[tuple[str, str], Matrix]:
    """(rounds, component) -> mixing matrix, averaged over the seeds of a cell."""
    found = [records.mixing(run) for run in one.runs]
    return {key: np.mean([each[key] for each in found], axis=0) for key in found[0]}


def _last(records: Records, one: "Outcome") -> dict[str, Matrix]:
    """The matrix of each layer in the last third of the rounds."""
    return {
        component: matrix for (part, component), matrix in over_seeds(records, one).items() if part == "last"
    }
