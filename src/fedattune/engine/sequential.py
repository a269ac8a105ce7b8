"""Run one client after the other: the reference engine, in which a breakpoint sees one model and one batch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from ..core.algorithm import ClientUpdate, Probing
from ..core.hardware import seed_rng
from ..core.params import Params
from ..core.payload import Batch
from ..core.task import Task
from ..data import Federation
from ..data.types import Index
from .base import ClientInputs, ClientOutputs, Engine, EvalPart, Scores, TaskLoss, score_samples
from .batches import LocalTraining


class SequentialEngine(Engine):
    """Run clients one by one, with plain autograd."""

    def __init__(self, task: Task, federation: Federation) -> None:
        super().__init__(task, federation)
        self._differentiate = task.eager_gradient

    def take_rows(self, federation: Federation) -> Engine:
        return SequentialEngine(self.task, federation)

    def _train(self, rule: ClientUpdate, ids: Tensor, inputs: ClientInputs, training: LocalTraining) -> ClientOutputs:
        results = []
        parts = self.federation.part(training.part)
        with torch.no_grad():
            for row, client in enumerate(ids.tolist()):
                with seed_rng(training.rng_seed(client), self.device):
                    own = inputs.rows(row)
                    results.append(self._train_one(rule, client, parts[client], own, training))
        outputs: ClientOutputs = tree_map(lambda *clients: torch.stack(clients), *results)
        return outputs

    def _train_one(
        self, rule: ClientUpdate, client: int, samples: Index, inputs: ClientInputs, training: LocalTraining
    ) -> ClientOutputs:
        sent, local_state, buffers, fresh, is_uploaded = inputs
        buffer_cell = [buffers]
        held_out = self.federation.part("validation")[client]
        batches, probed = training.choose_batches(rule, client, samples, held_out, local_state)
        n_steps = torch.tensor(float(len(batches)), dtype=self.dtype, device=self.device)
        context = training.make_round_context(n_steps, is_uploaded, training.round_tensor(n_steps))
        # Copies, for a model may write over its weights, and all clients share what was sent.
        carry = tree_map_only(Tensor, torch.clone, rule.begin(sent, local_state, fresh, context))
        noise = training.make_noise(client, len(samples), self.task.params.numel())
        gradient = self._gradient(buffer_cell, training)
        probe_gradient = partial(gradient, statistics=False)
        if isinstance(rule, Probing) and probed is not None:
            for index in probed:
                carry = rule.probe(carry, self._at(index), probe_gradient, TaskLoss(self.task, buffer_cell), context)
        for index in batches:
            batch = self._at(index)
            if noise is not None:
                real = torch.as_tensor(index if len(index) > 1 else index[0], device=self.device) >= 0
                batch = (*batch[:2], real.to(self.dtype) * noise.weight)
                gradient = self._gradient(buffer_cell, training, noise.draw(1, self.dtype)[0].to(self.device))
            carry = rule.step(carry, batch, gradient, context)
        return ClientOutputs(*rule.finish(carry, sent, local_state, context), buffer_cell[0], n_steps)

    def _at(self, index: Index) -> Batch:
        """Gather the mini-batches (per step, B) of sample numbers; a single one has no leading axis."""
        where = torch.as_tensor(index if len(index) > 1 else index[0], device=self.device)
        return self._batch(where, padded=bool((index < 0).any()))

    def evaluate_each(self, params: Params, buffers: Params, parts: Sequence[EvalPart], ids: Tensor) -> list[Scores]:
        scores = Scores.zeros(self._sizes(parts, ids), self.federation.kind)
        rows = [(part, row, client) for part in parts for row, client in enumerate(ids.tolist())]
        for at, (part, row, client) in enumerate(rows):
            model, own = params.rows(row), buffers.rows(row)
            samples = torch.as_tensor(self.federation.part(part)[client], device=self.device)
            for index in torch.split(samples, self._samples_at_once()):
                if len(index):
                    x, y = self._batch(index, padded=False)[:2]
                    right, losses = score_samples(self.task.predict(model, own, x), y, self.federation.kind)
                    scores.correct[at] += right.sum()
                    scores.loss[at] += losses.sum().double()
        return scores.split(len(ids))
