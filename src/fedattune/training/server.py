"""The server of a run: its rule, its state, and the last broadcast of that state."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import RunError
from ..core.hardware import seed_rng
from ..core.params import Params
from ..core.payload import Broadcast, MixingMatrices, Payload, ServerState
from ..runs.checkpoint import restore_tree
from ..runs.context import RunContext
from ..runs.rows import RowStorage, check_newcomer_memory, count_row_bytes
from ..server.wrapper import ServerWrapper
from .setup import check_compatible, init_server
from .uploads.step import RoundUploads

MIN_SHARED_VALUES = 2_000_000
"""Values of a round's models from which the server's operations use all cores beside the writer of rows.

To pass over so many takes a core about a millisecond: shorter operations may wait longer, until the system's scheduler
gives the core of the writer, or of another process, to their second thread.
"""


class Server:
    """Apply a server rule to its state.

    A broadcast for an evaluation is remembered until the state changes. The record of who learned from whom and the
    next round share it if they concern the same clients, so mixing matrices are computed once.
    """

    def __init__(self, context: RunContext, folder: Path | None) -> None:
        """Make the first state, with room for its rows in `folder` or, without it, in temporary files."""
        self._context = context
        settings, task, n = context.settings, context.task, context.n_clients
        state = init_server(context.algorithm, task, n, settings.seed)
        is_small = settings.participation.cohort_size(n) * task.params.numel() < MIN_SHARED_VALUES
        size = count_row_bytes(context.algorithm, task, state)
        self.storage = RowStorage.choose(settings, n, size, folder, is_small=is_small)
        self.rule: ServerWrapper[Any] = ServerWrapper(context.algorithm.server)
        self.state = self.storage.allocate_server(state)
        self._last: tuple[Tensor, Broadcast] | None = None
        if settings.participation.held_out:
            check_newcomer_memory(self.state)
        check_compatible(context.algorithm, self.state, context.all_ids[:1])

    def load_fewer(self, flat: Mapping[str, Tensor], n_before: int) -> None:
        """Load the state of a checkpoint with fewer clients, and let the rule add the others."""
        context, n = self._context, self._context.n_clients
        state = init_server(context.algorithm, context.task, n_before, context.settings.seed)
        small = RowStorage(n_before).allocate_server(state)
        tree = restore_tree({"server": small}, flat)
        self.state = self.add_clients(tree["server"], n_before, n - n_before)
        self._last = None

    def add_clients(self, state: ServerState, n_before: int, n_new: int) -> ServerState:
        """Return a state with more clients, after a try that the rule can send them something."""
        algorithm, settings, task = self._context.algorithm, self._context.settings, self._context.task
        size = count_row_bytes(algorithm, task, init_server(algorithm, task, 1, settings.seed))
        if RowStorage.choose(settings, n_before + n_new, size, None).is_on_disk:
            raise RunError("clients cannot join a run whose clients are on disk; start a new run")
        with seed_rng(settings.seed + n_before):
            larger: ServerState = self.rule.add_clients(state, n_new)
        self.rule.broadcast(larger, torch.arange(n_before, n_before + n_new, device=self._context.device))
        return larger

    @property
    def global_model(self) -> Params | None:
        return self.rule.global_model(self.state)

    def broadcast(self, ids: Tensor) -> Broadcast:
        """Return what the server sends to clients `ids` (R,) now, with the mixing matrices behind it."""
        if self._last and torch.equal(self._last[0], ids):
            return self._last[1]
        self._last = None  # two of them may not fit into memory
        with self.storage.share_cores():
            return self.rule.broadcast(self.state, ids)

    def make_payload(self, ids: Tensor) -> Payload:
        return self.broadcast(ids).payload

    def make_eval_payload(self, ids: Tensor) -> Payload:
        """Return the payload for an evaluation, and remember the broadcast."""
        broadcast = self.broadcast(ids)
        self._last = ids, broadcast
        return broadcast.payload

    def take_mixing(self, ids: Tensor) -> MixingMatrices | None:
        """Return the matrices behind the payload that clients `ids` would be sent now, and forget them.

        They are rows of the matrices behind the last evaluation's payload, if these clients were evaluated.
        """
        if not len(ids):
            return None
        if self._last and self._last[1].mixing and (mixing := self._last[1].mixing.select(ids)):
            eval_ids, broadcast = self._last
            # The next round may send to the same clients again; a payload for others is of no more use.
            self._last = (eval_ids, broadcast._replace(mixing=None)) if len(ids) == len(eval_ids) else None
            return mixing
        return self.broadcast(ids).mixing

    def aggregate(self, uploads: RoundUploads) -> None:
        self._last = None
        with self.storage.share_cores():
            sent = self._replace_starts(uploads)
            self.state = self.rule.aggregate(self.state, uploads.ids, sent, uploads.upload, uploads.n)

    def _replace_starts(self, uploads: RoundUploads) -> Payload:
        """Return what clients were sent, with stored uploads in place of models from which they did not start."""
        sent, ids = uploads.sent, uploads.ids
        rows = torch.isin(ids, ids.new_tensor(sorted(uploads.alone))).nonzero().flatten()
        if not len(rows):
            return sent
        stored = self.rule.find_stored(self.state, ids[rows])
        starts = {k: sent.params[k].index_copy(0, rows, v) for k, v in stored.items()}
        return sent._replace(params=Params({**sent.params, **starts}))

    def discard_uploads(self, ids: Iterable[int]) -> None:
        """Take the earlier uploads of clients `ids`, whose uploads were rejected, out of what others receive."""
        self._last = None
        rejected = torch.tensor(sorted(ids), dtype=torch.int64, device=self._context.device)
        self.state = self.rule.discard_uploads(self.state, rejected)

    def quarantine(self, ids: Iterable[int]) -> None:
        """Let clients `ids` receive their own models from now on, and nobody else theirs."""
        self._last = None
        clients = torch.tensor(sorted(ids), dtype=torch.int64, device=self._context.device)
        self.state = self.rule.quarantine(self.state, clients)

    def skip_round(self) -> None:
        self._last = None
        self.state = self.rule.skip_round(self.state)
