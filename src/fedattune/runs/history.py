"""The history of a run from its store."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..metrics import Metrics, summarise
from .store import RunStore

Entry = dict[str, Any]


def history(store: RunStore, names: Mapping[int, str]) -> list[Entry]:
    """Per evaluated round: metrics at both points on both parts, traffic and time so far, and who was missing.

    `dropped` and `absent` name clients since the evaluation before; `global` is there for methods that have
    one global model. `names` are those of clients, by number.
    """
    points: dict[tuple[int, str], dict[str, Metrics]] = {}
    for part in ("test", "validation"):
        for round_, point, (n, correct, loss) in store.scores(part):
            found = points.setdefault((round_, part), {})
            found[point] = summarise(n.astype(np.int64), correct.astype(np.int64), loss)
    entries: list[Entry] = []
    dropped: set[int] = set()
    absent: set[int] = set()
    for record in store.rounds():
        dropped |= set(record.dropped)
        absent |= set(record.absent)
        if (test := points.get((record.round, "test"))) is not None:
            entry = {
                "round": record.round,
                "received": test.get("received"),
                "trained": test.get("trained"),
                "validation": points.get((record.round, "validation")),
                "bytes": {"up": record.bytes_up, "down": record.bytes_down},
                "seconds": record.seconds,
                "dropped": [names[i] for i in sorted(dropped)],
                "absent": [names[i] for i in sorted(absent)],
            }
            entries.append(entry | ({"global": test["global"]} if "global" in test else {}))
            dropped, absent = set(), set()
    return entries
