"""Decisions of a method for each client: how much to take from others, and in which group of clients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import list_some
from ...core.text import format_percent
from ..compare import FloatArray
from . import FLAT_WEIGHT, ROUNDS_BACK

if TYPE_CHECKING:
    from ...runs.metrics import RunMetrics

OWN_BELOW = 0.1
"""Weight of the shared model below which a client's own model decides."""
SHARED_ABOVE = 0.9
"""Weight of the shared model above which it decides."""
MAX_NAMED = 5
"""Clients that a sentence names."""
MAX_LISTED = 60
"""Clients that a line of `explain` names."""


@dataclass(frozen=True)
class Decisions:
    """Decisions of one run for its evaluated clients.

    Attributes:
        shares: weight of the shared model in each client's predictions, 0 to 1 (E,); NaN where it is not known.
        groups: names of the clients that share one model, the largest group first; None if there are no groups.
        is_whole_model: the groups concern all layers.
    """

    method: str
    names: list[str]
    shares: FloatArray
    groups: list[list[str]] | None
    is_whole_model: bool = True

    def describe(self, n_runs: int = 1) -> str:
        """Describe groups and clients in one sentence, for the first of `n_runs` runs of the method."""
        if self.groups is None:
            with_ = f"In the first of {n_runs} runs of" if n_runs > 1 else "With"
            return f"{with_} {self.method}, predictions come {self._describe_shares()}."
        first = f"In the first of {n_runs} runs, " if n_runs > 1 else ""
        found = "one group" if len(self.groups) == 1 else f"{len(self.groups):,} groups"
        return f"{first}{self.method} found {found} of clients; predictions come {self._describe_shares()}."

    def _describe_shares(self) -> str:
        shares = self.shares
        is_own, is_shared = shares < OWN_BELOW, shares > SHARED_ABOVE
        picked = (is_own, is_shared, (shares >= OWN_BELOW) & (shares <= SHARED_ABOVE))
        own, shared, both = ([self.names[i] for i in np.flatnonzero(one).tolist()] for one in picked)
        name = "their group's model" if self.groups and len(self.groups) > 1 else "the shared model"
        kinds = {"their own model": own, name: shared}
        kinds["both" if own and shared else f"a mixture of their own and {name}"] = both
        n = sum(map(len, kinds.values()))
        parts: list[str] = []
        for model, clients in kinds.items():
            if len(clients) == n:
                return f"from {model} for all {n:,} clients"
            if clients:
                of_all = "" if parts else f" of {n:,} clients"
                names = f" ({list_some(clients, MAX_NAMED)})" if clients is own else ""
                parts.append(f"from {model} for {len(clients):,}{of_all}{names}")
        return ", ".join(parts)

    def write_paragraphs(self) -> list[str]:
        """Write for `explain` the sentence, the weight of the shared model for each client, and the groups."""
        text = [self.describe(), "Weight of the shared model in the predictions of each client:"]
        if self.groups is None or len(self.groups) == 1:
            text[1] += f" {self._list_weights(self.names)}."
        else:
            text += [f"  group {k}: {self._list_weights(one)}" for k, one in enumerate(self.groups, 1)]
            text.append("The clients of a group share one model, and learn from each other only.")
        if self.groups and (unknown := len(self.names) - sum(map(len, self.groups))):
            text.append(f"Clients without a stored mixture, whose group is not known: {unknown:,}.")
        if self.groups and self.is_whole_model:
            text.append("This holds for all layers alike.")
        return text

    def _list_weights(self, clients: Sequence[str]) -> str:
        shares = self.list_shares()
        words = [f"{name} {format_percent(shares[name], 0)}" for name in clients[:MAX_LISTED]]
        rest = len(clients) - len(words)
        return ", ".join(words) + (f", and {rest:,} more" if rest else "")

    def list_shares(self) -> dict[str, float | None]:
        """List the weight of the shared model for each client; None where it is not known."""
        values = zip(self.names, self.shares.tolist(), strict=True)
        return {name: share if np.isfinite(share) else None for name, share in values}

    def describe_client(self, name: str) -> str | None:
        """Describe how much one client takes from others, and who is in its group; None if it is not known."""
        share = self.shares[self.names.index(name)]
        if not np.isfinite(share):
            return None
        text = f"Its predictions come to {format_percent(share, 0)} from "
        group = next((one for one in self.groups or [] if name in one), None)
        if group is None or len(self.groups or []) == 1:
            return f"{text}the shared model."
        others = [one for one in group if one != name]
        whose = f", which it shares with {list_some(others, MAX_NAMED)}" if others else ", in which it is alone"
        return f"{text}its group's model{whose}."


def read_decisions(run: "RunMetrics") -> Decisions | None:
    """Read what a run decided; None if its method reports no weight of a shared model, or an older version wrote it."""
    shares = run.facts.get("client_scalars", {}).get("shared")
    if shares is None or not run.facts["clients"]:
        return None
    values = np.array([np.nan if share is None else share for share in shares], dtype=np.float64)
    if not np.isfinite(values).any():
        return None
    names = [str(client["id"]) for client in run.facts["clients"]]
    group_of, is_whole = find_groups(run)
    members: dict[int, list[str]] = {}
    for number, name in zip(run.eval_ids, names, strict=True):
        if number in group_of:
            members.setdefault(group_of[number], []).append(name)
    groups = sorted(members.values(), key=len, reverse=True) or None
    return Decisions(run.algorithm, names, values, groups, is_whole)


def describe_decisions(groups: "Mapping[str, Sequence[RunMetrics]]", first: str | None = None) -> str:
    """Describe what a method decided, in one sentence; empty if no method tells."""
    for name in sorted(groups, key=lambda name: name != first):
        if decisions := next(filter(None, map(read_decisions, groups[name])), None):
            return decisions.describe(len(groups[name]))
    return ""


def find_groups(run: "RunMetrics") -> tuple[dict[int, int], bool]:
    """Find the clients that share one model: number of a client -> its group, and whether it is the whole model.

    Clients of one group receive the same mixture, of models of this group alone. Clients that took part in other rounds
    join the group of which their last mixture is made. Nothing is found if mixtures of clients overlap otherwise.
    """
    group_of: dict[int, int] = {}
    is_whole = True
    for round_ in reversed(list(run.mixing)[-ROUNDS_BACK:]):
        rows, columns, weights = run.mixing.among(round_)
        is_whole = is_whole and len(weights) == 1
        matrices = list(weights.values())
        if any(np.ptp(np.stack([matrices[0], other]), axis=0).max() > FLAT_WEIGHT for other in matrices[1:]):
            return {}, False  # another mixture for each layer
        parts = _divide(matrices[0])
        if parts is None:
            return {}, False
        for receivers, senders in parts:
            members = dict.fromkeys([*(rows[i] for i in receivers), *(columns[i] for i in senders)])
            known = Counter(group_of[one] for one in members if one in group_of)
            group = known.most_common(1)[0][0] if known else len(set(group_of.values()))
            for one in members:
                group_of.setdefault(one, group)
        if all(number in group_of for number in run.eval_ids):
            break
    return group_of, is_whole


def _divide(matrix: Any) -> list[tuple[list[int], list[int]]] | None:
    """Divide a mixing matrix into receivers and senders of each group; None if there are no groups."""
    gives, which = np.unique(matrix > 0, axis=0, return_inverse=True)
    if not gives.any(1).all() or (gives.sum(0) > 1).any():
        return None
    parts = []
    for k, senders in enumerate(gives):
        receivers = np.flatnonzero(which.reshape(-1) == k)
        if np.ptp(matrix[receivers], axis=0).max() > FLAT_WEIGHT:
            return None
        parts.append((receivers.tolist(), np.flatnonzero(senders).tolist()))
    return parts
