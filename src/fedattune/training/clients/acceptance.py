"""Acceptance: a client refuses a received model that is worse on its validation rows than the model it had.

`--accept better` wraps the client rule of any method, so that it works wherever the client is: `AcceptBetter` keeps the
model of the client's last upload, and a judge compares it with what a new payload offers, before the client trains with
it or is evaluated with it. After a refusal the client goes on as if it had been sent its own model: by
`Substituting.substitute`, and without corrections by what other clients did.

The offered model is that of the payload, with the tensors that never left the client; or the start that the rule makes
of the payload by a look at data. Losses are compared, as few rows say more by their losses than by their classes; an
equal loss is accepted. A client without validation rows accepts everything. BatchNorm statistics are not judged: both
models are compared with those that the client has.

To the rule, a corrupted model is like one that is worse because it is an average of unlike clients. Most methods are
therefore close to training alone with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ...client import ClientWrapper
from ...core.algorithm import Finished, StepChanges
from ...core.params import Params, choose
from ...core.payload import Batch, Grad, LocalState, Loss, Payload, RoundContext
from ...engine.base import ClientInputs, Engine
from ...engine.batches import LocalTraining
from ...runs.context import RunContext

OWN, REFUSAL = "last_upload", "refusal"
"""Entries of the local state: the model of the last upload, and whether the last payload was refused (1.0)."""


class _Carry(NamedTuple):
    inner: Any
    refused: Tensor


@dataclass(frozen=True)
class AcceptBetter(ClientWrapper):
    """Client rule that follows the rule of the method, with the client's own model in place of a refused one."""

    def init_local_state(self, w0: Params) -> LocalState:
        none = next(iter(w0.values())).new_zeros(())
        return {**self.inner.init_local_state(w0), OWN: w0, REFUSAL: Params(refused=none)}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        refused = _is_refused(local_state)
        inner = self.inner.begin(
            self._choose(sent, local_state), _strip(local_state), fresh, _restrict(context, refused)
        )
        return _Carry(inner, refused)

    def probe_passes(self, local_state: LocalState) -> Tensor:
        return super().probe_passes(_strip(local_state))

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        context = _restrict(context, carry.refused)
        return carry._replace(inner=super().probe(carry.inner, batch, grad, loss, context))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        """Take a step of the rule; after a refusal, one without corrections by other clients."""
        context = _restrict(context, carry.refused)
        return carry._replace(inner=self.inner.step(carry.inner, batch, grad, context))

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        return super().measure_step(carry.inner, batch, grad, _restrict(context, carry.refused))

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        upload, new_state = self.inner.finish(
            carry.inner, self._choose(sent, local_state), _strip(local_state), _restrict(context, carry.refused)
        )
        return upload, {**new_state, OWN: upload.params, REFUSAL: local_state[REFUSAL]}

    def received_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return self.inner.received_model(self._choose(sent, local_state), _strip(local_state), fresh)

    def trained_model(self, upload: Payload, local_state: LocalState) -> Params:
        return self.inner.trained_model(upload, _strip(local_state))

    def resting_model(self, sent: Payload, local_state: LocalState, fresh: Tensor) -> Params:
        return super().resting_model(self._choose(sent, local_state), _strip(local_state), fresh)

    def _choose(self, sent: Payload, local_state: LocalState) -> Payload:
        refused = _is_refused(local_state)
        own = self.substitute(sent, local_state[OWN])
        extra = {k: choose(refused, own.extra[k], v) for k, v in sent.extra.items()}
        return Payload(choose(refused, own.params, sent.params), extra)


def _is_refused(local_state: LocalState) -> Tensor:
    return local_state[REFUSAL]["refused"] > 0


def _strip(local_state: LocalState) -> LocalState:
    return {k: v for k, v in local_state.items() if k not in (OWN, REFUSAL)}


def _restrict(context: RoundContext, refused: Tensor) -> RoundContext:
    return context._replace(is_uploaded=context.is_uploaded & ~refused)


@dataclass(frozen=True)
class Judge:
    """Decide which clients refuse their payload.

    `personal` names the tensors that never leave a client. `plan` returns the local training of the coming round, for
    rules whose start needs a look at data.
    """

    rule: AcceptBetter
    engine: Engine
    personal: frozenset[str]
    plan: Callable[[], LocalTraining]

    def decide(self, ids: Tensor, inputs: ClientInputs) -> ClientInputs:
        """Return the inputs with a decision on each payload that is new; older decisions stand."""
        before = inputs.local_state[REFUSAL]["refused"]
        offered = self._measure(ids, self._make_offered(ids, inputs), inputs.buffers)
        had = self._measure(ids, inputs.local_state[OWN], inputs.buffers)
        is_worse = ~(offered <= had)  # also if it is no number
        refused = torch.where(inputs.fresh, is_worse.to(before), before)
        return _replace_refusals(inputs, refused)

    def _make_offered(self, ids: Tensor, inputs: ClientInputs) -> Params:
        own = inputs.local_state[OWN]
        if (probe := self.rule.plan.probe) and probe.makes_received_model:
            tried = _replace_refusals(inputs, torch.zeros_like(inputs.local_state[REFUSAL]["refused"]))
            training = replace(self.plan(), steps=0, epochs=None)
            outputs = self.engine.train(self.rule, ids, tried, training)
            started: Params = vmap(self.rule.trained_model)(outputs.upload, outputs.local_state)
            return started
        offered: Params = vmap(self.rule.offered_model)(inputs.sent)
        return Params({k: own[k] if k in self.personal else v for k, v in offered.items()})

    def _measure(self, ids: Tensor, models: Params, buffers: Params) -> Tensor:
        (scores,) = self.engine.evaluate(models, buffers, ("validation",), ids)
        return scores.loss


def _replace_refusals(inputs: ClientInputs, refused: Tensor) -> ClientInputs:
    return inputs._replace(local_state={**inputs.local_state, REFUSAL: Params(refused=refused)})


class Refusals:
    """The received models that clients refused in a run; nothing is counted if clients accept everything.

    `clients` (N,) counts the refusals of each client, `rounds` has pairs of a round and how many refused in it, and
    `n_trained` counts the trainings of all clients and rounds.
    """

    def __init__(self, context: RunContext) -> None:
        self.context, self.is_on = context, context.settings.defence.accept == "better"
        self.clients = torch.zeros(context.n_clients if self.is_on else 0, dtype=torch.int64)
        self.rounds: list[tuple[int, int]] = []
        self.n_trained = 0

    def add_round(self, r: int, refused: Sequence[int], n_trained: int) -> None:
        if self.is_on:
            self.clients[list(refused)] += 1
            self.rounds += [(r, len(refused))] if refused else []
            self.n_trained += n_trained

    def state_tree(self) -> dict[str, Any]:
        if not self.is_on:
            return {}
        rounds = torch.tensor(self.rounds, dtype=torch.int64).reshape(-1, 2)
        return {"refusals": {"clients": self.clients, "rounds": rounds, "n_trained": torch.tensor(self.n_trained)}}

    def load(self, flat: Mapping[str, Tensor]) -> None:
        """Take over the counts of a checkpoint, which may have fewer clients."""
        if self.is_on:
            before = flat["refusals/clients"]
            self.clients[: len(before)] = before
            self.rounds = [(r, n) for r, n in flat["refusals/rounds"].tolist()]
            self.n_trained = int(flat["refusals/n_trained"])

    def facts(self) -> dict[str, Any]:
        """Return the entry `refusals` of the facts; nothing if clients accept everything."""
        if not self.is_on:
            return {}
        names, counts = self.context.federation.names, self.clients.tolist()
        clients = {names[i]: n for i, n in enumerate(counts) if n}
        return {"refusals": {"clients": clients, "rounds": [list(pair) for pair in self.rounds]}}

    def notes(self, name: str) -> list[str]:
        if not self.is_on or not self.context.has_shared_parameters:
            return []
        share = int(self.clients.sum()) / max(1, self.n_trained)
        notes = [f"{name}: clients refused {100 * share:.0f}% of the models that they were sent (--accept better)"]
        n_without = int((self.context.federation.sizes("validation") == 0).sum())
        if n_without:
            notes.append(f"{n_without} clients have no validation rows and accept everything (--accept better)")
        return notes
