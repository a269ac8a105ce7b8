"""Payloads taken apart for sites elsewhere, and what comes back put together."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .core import Payload
from .engines import Held, Scores
from .evaluation import Scored
from .params import Params


def merged(found: Iterable[Sequence[Scored]], where: torch.device) -> list[Scored]:
    """The scores of all sites, clients sorted; who has no samples of a part that others have counts with none."""
    pieces = [list(scored) for scored in found if scored]
    keys = dict.fromkeys((one.point, one.part) for piece in pieces for one in piece)
    merged = []
    for point, part in keys:
        some = [_of(piece, point, part) for piece in pieces]
        some = [one for one in some if len(one.ids)]
        ids, rows = torch.cat([one.ids for one in some]).to(where).sort()
        scores = Scores(
            *(torch.cat(column)[rows] for column in zip(*(one.scores for one in some), strict=True))
        )
        merged.append(Scored(point, part, ids, scores))
    return merged


def _of(piece: Sequence[Scored], point: str, part: Held) -> Scored:
    """The scores of one site at one point on one part."""
    for one in piece:
        if (one.point, one.part) == (point, part):
            return one
    same = next((one for one in piece if one.point == point), None)
    ids = piece[0].ids[:0] if same is None else same.ids
    zeros = torch.zeros(len(ids), device=piece[0].scores.n.device)
    return Scored(point, part, ids, Scores(zeros.long(), zeros.long(), zeros.double()))


def places(ids: Tensor, members: Tensor) -> Tensor:
    """The places in `ids` of those that are at a site."""
    return torch.isin(ids, members).nonzero().flatten()


def part_of(payload: Payload, rows: Tensor, n: int) -> Payload:
    """Some rows of a payload of n; a model that is the same for all stays one."""
    if len(rows) == n:
        return payload

    def some(params: Params) -> Params:
        return params.map(
            lambda v: v[:1].expand(len(rows), *v.shape[1:]) if v.stride(0) == 0 else v.index_select(0, rows)
        )

    return Payload(some(payload.params), {k: some(v) for k, v in payload.extra.items()})
