"""The reference engine: one client after the other, so that a breakpoint sees one model and one batch."""

from typing import Literal

import torch
from torch import Tensor

from ..core import ClientUpdate
from ..params import Params, stack
from .base import Engine, Inputs, Scores, Trained, join, score
from .work import Work


class Loop(Engine):
    """Runs clients one by one."""

    def train(self, rule: ClientUpdate, ids: Tensor, inputs: Inputs, work: Work) -> Trained:
        """Train one client at a time."""
        results = []
        parts = self.federation.part(work.part)
        with torch.random.fork_rng(), torch.no_grad():
            for row, client in enumerate(ids.tolist()):
                mine, kept, buffers, fresh = inputs.rows(row)
                box = [buffers]
                torch.manual_seed(work.noise_seed(client))
                gradient = self._gradient(box, work)
                batches = torch.as_tensor(
                    work.batches(client, parts[client], rule.batches_per_step), device=self.device
                )
                carry = rule.begin(mine, kept, fresh)
                for index in batches if rule.batches_per_step > 1 else batches.squeeze(1):
                    batch = self._batch(index, padded=bool((index < 0).any()))
                    carry = rule.step(carry, batch, gradient, work.lr)
                n_steps = torch.tensor(float(len(batches)), dtype=self.dtype, device=self.device)
                upload, kept = rule.finish(carry, mine, kept, n_steps, work.lr)
                results.append(Trained(upload, kept, box[0]))
        return join(results, stack)

    def evaluate_each(self, params: Params, buffers: Params, part: Literal["validation", "test"]) -> Scores:
        """Evaluate one client at a time."""
        sizes = self.federation.sizes(part).to(self.device)
        correct = torch.zeros(len(sizes), dtype=torch.int64, device=self.device)
        loss = torch.zeros(len(sizes), dtype=torch.float64, device=self.device)
        for client, samples in enumerate(self.federation.part(part)):
            model, own = params.rows(client), buffers.rows(client)
            for index in torch.split(torch.as_tensor(samples, device=self.device), self._samples_at_once()):
                if len(index):
                    x, y = self._batch(index, padded=False)[:2]
                    right, losses = score(self.task.predict(model, own, x), y)
                    correct[client] += right.sum()
                    loss[client] += losses.sum().double()
        return Scores(sizes, correct, loss)
