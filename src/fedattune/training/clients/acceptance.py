"""Acceptance: a client refuses a received model that harms it, and goes on with its own.

`Accepting` wraps the client rule of any method, so that it works wherever the client is: it keeps the client's own
model, that of its last upload, and a judge decides on a new payload before the client trains with it or is evaluated
with it. After a refusal the client goes on as if it had been sent its own model: by `Substituting.substitute`, and
without corrections by what other clients did. The offered model is that of the payload, with the tensors that never
left the client; or the start that the rule makes of the payload by a look at data. With losses l over rows of the
client:

    better     refuse if l(offered) > l(own), over validation rows
    harmless   refuse if l(offered) > RATIO l(best) + GAP, over MAX_ROWS rows for training and validation, with the best
               offered model so far, unless l(best) is above HIGH times the first loss and l(own) not below l(offered)
               by PROGRESS; or if l(offered) > RATIO l(own) + GAP, after STALLED rounds in which the best did not become
               better by PROGRESS, unless it is better over validation rows. If l(best) is then still above HIGH times
               the first loss, refuse for STALLED rounds anyway; after these only if, over validation rows, l(own) fell
               by PROGRESS, or l(offered) is that much above it. A trial that failed raises this HIGH to RAISE times
               itself. For predictions, also if the model that the rule makes of the payload is that much worse, over
               validation rows, than the one that it makes of the own model.

To `better`, a corrupted model is like one that is worse because it is an average of unlike clients, so most methods
are close to training alone. `harmless` leaves the averages of honest clients: their loss falls from round to round,
though it is above that of the own model. Attackers who keep all from learning spoil own models too, as these start
from received ones: only training alone tells. So do corrections by other clients (of SCAFFOLD, say), which no
comparison finds: a client whose received models once harmed it, or stopped improving below HIGH, takes no more of them.
BatchNorm statistics are not judged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...client import ClientWrapper
from ...core.algorithm import Finished, StepChanges
from ...core.params import Params, choose
from ...core.payload import Batch, Grad, LocalState, Loss, Payload, RoundContext
from ...core.settings import Settings
from ...core.text import format_percent
from ...data import Federation
from ...data.client_index import ClientIndex, RaggedIndex
from ...engine.base import ClientInputs, Engine
from ...engine.batches import LocalTraining
from ...runs.context import RunContext

ModelRule = Callable[[Payload, LocalState, Tensor], Params]

OWN, DECISION = "last_upload", "decision"
"""Entries of the local state: the own model (see `Encoding`), and `refused`: 1.0 if the last payload was."""

ON_TRIAL = 0.5
"""`refused` of a client that tries to train alone. It says nothing of others, so nobody is blamed for it."""

MEMORY = ("quality", "first", "high", "trial", "stalled", "distrusts")
"""Memory of `harmless`, beside `refused`: the best loss, the first one, the loss above which a client trains alone, and
the own loss when it began to, as 1 / (1 + l); rounds that stalled; and whether the client takes no corrections."""

RATIO, GAP = 1.3, 0.1
"""Loss above which a model is clearly worse than another: RATIO times the other's, and GAP (nats, or squared
deviations of a standardized number). Without an attack, the loss of what clients are sent falls nearly every round, and
one round of an attack raises it by half or more."""

PROGRESS, STALLED = 0.05, 3
"""Share by which the best loss must fall, in so many rounds, for a model that is worse than the own one."""

HIGH, RAISE = 0.5, 1.5
"""Share of the initial loss above which a client tries to train alone, if received models do not become better; and
the factor by which each failed trial raises it: where labels are noisy, the loss stays high without an attack."""

MAX_ROWS = 128
"""Rows per client on which `harmless` compares models: a look at all would take as long as training."""


class _Carry(NamedTuple):
    inner: Any
    refused: Tensor
    distrusts: Tensor


@dataclass(frozen=True)
class Accepting(ClientWrapper):
    """Client rule that follows the rule of the method, with the client's own model in place of a refused one."""

    policy: Literal["better", "harmless"]

    def init_local_state(self, w0: Params) -> LocalState:
        names = ("refused", *MEMORY) if self.policy == "harmless" else ("refused",)
        none = next(iter(w0.values())).new_zeros(())
        decision = Params({name: none.clone() for name in names})
        return {**self.inner.init_local_state(w0), OWN: w0, DECISION: decision}

    def begin(self, sent: Payload, local_state: LocalState, fresh: Tensor, context: RoundContext) -> _Carry:
        refused, distrusts = _is_refused(local_state), _distrusts(local_state)
        inner = self.inner.begin(
            self._choose(sent, local_state), _strip(local_state), fresh, _restrict(context, distrusts)
        )
        return _Carry(inner, refused, distrusts)

    def probe_passes(self, local_state: LocalState) -> Tensor:
        return super().probe_passes(_strip(local_state))

    def probe(self, carry: _Carry, batch: Batch, grad: Grad, loss: Loss, context: RoundContext) -> _Carry:
        context = _restrict(context, carry.distrusts)
        return carry._replace(inner=super().probe(carry.inner, batch, grad, loss, context))

    def step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> _Carry:
        """Take a step of the rule; after a refusal, one without corrections by other clients."""
        context = _restrict(context, carry.distrusts)
        return carry._replace(inner=self.inner.step(carry.inner, batch, grad, context))

    def measure_step(self, carry: _Carry, batch: Batch, grad: Grad, context: RoundContext) -> StepChanges:
        return super().measure_step(carry.inner, batch, grad, _restrict(context, carry.distrusts))

    def finish(self, carry: _Carry, sent: Payload, local_state: LocalState, context: RoundContext) -> Finished:
        base = self.find_base(sent, self._choose(sent, local_state))
        context = _restrict(context, carry.distrusts)
        upload, new_state = self.inner.finish(carry.inner, base, _strip(local_state), context)
        new_state = {**new_state, OWN: self.own_model(upload, new_state), DECISION: local_state[DECISION]}
        return self.report_distrust(upload, carry.distrusts), new_state

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
    return local_state[DECISION]["refused"] > 0


def _distrusts(local_state: LocalState) -> Tensor:
    """Return whether the client takes no corrections by other clients."""
    decision = local_state[DECISION]
    return (decision["refused"] > 0) | (decision.get("distrusts", decision["refused"]) > 0)


def _strip(local_state: LocalState) -> LocalState:
    return {k: v for k, v in local_state.items() if k not in (OWN, DECISION)}


def _restrict(context: RoundContext, distrusts: Tensor) -> RoundContext:
    return context._replace(is_uploaded=context.is_uploaded & ~distrusts)


@dataclass(frozen=True)
class Judge:
    """Decide which clients refuse their payload.

    Attributes:
        rule: the client rule.
        engine: trains, for rules whose start needs a look at data, and evaluates on validation rows.
        sample_engine: evaluates on the rows that `harmless` compares models on; they are its validation rows.
        personal: the tensors that never leave a client.
        plan: returns the local training of the coming round.
    """

    rule: Accepting
    engine: Engine
    sample_engine: Engine
    personal: frozenset[str]
    plan: Callable[[], LocalTraining]

    def decide(self, ids: Tensor, inputs: ClientInputs) -> ClientInputs:
        """Return the inputs with a decision on each payload that is new; older decisions stand."""
        offered, own, before = self._make_offered(ids, inputs), inputs.local_state[OWN], inputs.local_state[DECISION]
        if self.rule.policy == "better":
            losses = (_measure(self.engine, ids, models, inputs.buffers) for models in (offered, own))
            decision = Params(refused=_is_above(*losses).to(before["refused"]))
        else:
            measure = partial(_measure, self.sample_engine, ids, buffers=inputs.buffers)
            hold_out = partial(_measure, self.engine, ids, buffers=inputs.buffers)
            decision = update_decision(
                before, measure(offered), lambda: measure(own), lambda: (hold_out(offered), hold_out(own))
            )
        return _replace_decisions(inputs, decision.map(lambda new, old: torch.where(inputs.fresh, new, old), before))

    def choose_models(self, rule: ModelRule, ids: Tensor, inputs: ClientInputs) -> Params:
        """Return the models (E, ...) that a rule makes of what clients accept."""
        decided = self.decide(ids, inputs).local_state
        if self.rule.policy == "better":
            return vmap(rule)(inputs.sent, decided, inputs.fresh)
        models, losses = [], []
        for refused in (0.0, 1.0):
            decision = Params({**decided[DECISION], "refused": torch.full_like(decided[DECISION]["refused"], refused)})
            models.append(vmap(rule)(inputs.sent, {**decided, DECISION: decision}, inputs.fresh))
            losses.append(_measure(self.engine, ids, models[-1], inputs.buffers))
        # A refused model predicts only if it is better. Without validation rows, both losses are 0.
        takes_own = _is_above(losses[0], RATIO * losses[1] + GAP) | (_is_refused(decided) & ~(losses[0] < losses[1]))
        return Params({k: torch.where(_align(takes_own, v), models[1][k], v) for k, v in models[0].items()})

    def _make_offered(self, ids: Tensor, inputs: ClientInputs) -> Params:
        own = inputs.local_state[OWN]
        if (probe := self.rule.plan.probe) and probe.makes_received_model:
            before = inputs.local_state[DECISION]
            tried = _replace_decisions(inputs, Params({**before, "refused": torch.zeros_like(before["refused"])}))
            training = replace(self.plan(), steps=0, epochs=None)
            outputs = self.engine.train(self.rule, ids, tried, training)
            started: Params = vmap(self.rule.trained_model)(outputs.upload, outputs.local_state)
            return started
        offered: Params = vmap(self.rule.offered_model)(inputs.sent)
        return Params({k: own[k] if k in self.personal else v for k, v in offered.items()})


def _measure(engine: Engine, ids: Tensor, models: Params, buffers: Params) -> Tensor:
    """Return the mean losses (E,) over validation rows; 0 without any."""
    (scores,) = engine.evaluate(models, buffers, ("validation",), ids)
    return scores.loss / scores.n.clamp_min(1)


def _is_above(losses: Tensor, limits: Tensor) -> Tensor:
    return ~(losses <= limits)  # also if it is no number


def _align(flags: Tensor, stack: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (stack.dim() - 1))


def update_decision(
    before: Params, offered: Tensor, measure_own: Callable[[], Tensor], hold_out: Callable[[], tuple[Tensor, Tensor]]
) -> Params:
    """Return the decision of `harmless` by losses of offered models; `hold_out` measures these and the own ones."""
    best, measure_own = _to_loss(before["quality"]), cache(measure_own)
    if (is_first := best.isinf()).any():  # the own model is then the initial one
        best = torch.where(is_first, measure_own(), best)
    first = torch.where(is_first, best, _to_loss(before["first"]))
    high, trial = torch.where(is_first, HIGH * best, _to_loss(before["high"])), _to_loss(before["trial"])
    is_above = _is_above(offered, RATIO * best + GAP)
    is_harmful = is_above.clone()
    if (is_doubtful := is_above & (best > HIGH * first) & offered.isfinite()).any():
        # A client with few rows may learn these by heart, so that its loss on validation rows rises.
        is_harmful &= ~is_doubtful | _is_above((1 - PROGRESS) * offered, measure_own())
    is_better = offered < (1 - PROGRESS) * best
    stalled = torch.where(is_better, torch.zeros_like(best), before["stalled"] + 1)
    tries = on_trial = torch.zeros_like(is_harmful)
    if (is_stalled := stalled >= STALLED).any():
        tries, is_worse = is_stalled & (best > high), _is_above(offered, RATIO * measure_own() + GAP)
        if (tries | (is_stalled & is_worse)).any():
            # Alone, a client learns its training rows by heart, also where labels are wrong.
            other, own = hold_out()
            is_worse = torch.where(tries, _is_above(other, RATIO * own + GAP), is_worse & ~(other < own))
            is_over = tries & (stalled >= 2 * STALLED)
            learns = own < (1 - PROGRESS) * trial
            fails = is_over & ~learns & ~is_worse
            starts = tries & ((stalled == STALLED) | (is_over & learns))
            trial, high = torch.where(starts, own, trial), torch.where(fails, RAISE * high, high)
            stalled = torch.where(starts, torch.full_like(stalled, STALLED), stalled.masked_fill(fails, 0))
            on_trial = tries & ~fails & ~is_worse
        is_harmful |= is_stalled & is_worse
    # The best is that of the last progress, so that slow progress counts too.
    best = torch.where((is_better | is_first) & ~is_harmful, offered, best)
    new = {
        "refused": torch.where(is_harmful, 1.0, ON_TRIAL * on_trial),
        "quality": 1 / (1 + best),
        "stalled": stalled,
        "distrusts": is_above | is_harmful | (is_stalled & ~tries) | (before["distrusts"] > 0),
        "first": 1 / (1 + first),
        "high": 1 / (1 + high),
        "trial": 1 / (1 + trial),
    }
    return Params({k: v.to(before[k]) for k, v in new.items()})


def _to_loss(quality: Tensor) -> Tensor:
    return 1 / quality.double() - 1


def _replace_decisions(inputs: ClientInputs, decision: Params) -> ClientInputs:
    return inputs._replace(local_state={**inputs.local_state, DECISION: decision})


def sample_rows(federation: Federation, *, takes_training: bool) -> Federation:
    """Return a federation whose validation rows are those on which `harmless` compares models, without other rows."""
    validation, train = federation.part("validation"), federation.part("train")
    rows = validation
    if takes_training:
        pairs = zip(validation, train, strict=True)
        rows = RaggedIndex.from_lists([np.concatenate(pair)[:MAX_ROWS] for pair in pairs])
    none = RaggedIndex(np.empty(0, dtype=np.int64), np.zeros(len(rows) + 1))
    return replace(federation, clients=ClientIndex(none, rows, none, federation.names))


def find_policy(settings: Settings) -> Literal["better", "harmless"] | None:
    """Return what clients accept; None if they accept everything.

    Nobody attacks a simulation without `attack`. With differential privacy of clients, that one refuses would tell what
    the noise hides.
    """
    accept = settings.defence.accept
    if accept == "auto":
        return "harmless" if settings.attack is not None and settings.privacy.client is None else None
    return None if accept == "always" else accept


class Refusals:
    """The received models that clients refused in a run; nothing is counted if clients accept everything.

    `clients` (N,) counts the refusals of each client, `rounds` has pairs of a round and how many refused in it, and
    `n_trained` counts the trainings of all clients and rounds.
    """

    def __init__(self, context: RunContext) -> None:
        self.context, self.policy = context, find_policy(context.settings)
        self.is_on = self.policy is not None
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
        notes = [
            f"{name}: clients refused {format_percent(share, 0)} of the models that they were sent "
            f"(--accept {self.policy})"
        ]
        n_without = int((self.context.federation.sizes("validation") == 0).sum())
        if n_without and self.policy == "better":
            words = ("client has", "accepts") if n_without == 1 else ("clients have", "accept")
            notes.append(f"{n_without:,} {words[0]} no validation rows and {words[1]} everything (--accept better)")
        return notes
