"""Attacks: malicious clients in a simulation, so that methods and defences can be tried.

A model attack changes what attackers upload, a data attack the rows that they train on. Attackers otherwise follow the
method: they train, upload and receive. They know everything that their attack needs, also the honest uploads of the
round. The round loop corrupts uploads at the server's end, so that engines and backends see the same attack.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, did_you_mean
from ...core.params import Params, find_layer, squared_norm
from ...server.robust import gram
from .poisoning import DataAttack, flip_labels, label_as_one, plant_trigger, shift_labels, swap_labels
from .screening import CLIP


class View(NamedTuple):
    """The view of attackers in a round on one stack of tensors: the models, or an extra that is like a model.

    Attributes:
        received, trained: (A, ...) what each of the A attackers received, and would upload if it were honest.
        honest, honest_received: (H, ...) uploads of the honest clients of the round, or of the attackers if there are
            none; and what these clients received.
        head: names of the tensors of the last layer that is shared.
        victim: row of `honest` that the attack is aimed at.
        strength: the number behind the colon of `--attack NAME:NUMBER`, or the attack's default.
        rng: the random stream of the round.
        run_rng: a random stream that begins anew in each round, for directions that stay.
    """

    received: Params
    trained: Params
    honest: Params
    honest_received: Params
    head: frozenset[str]
    victim: int
    strength: float
    rng: np.random.Generator
    run_rng: np.random.Generator

    @property
    def n_attackers(self) -> int:
        return len(next(iter(self.trained.values())))

    @property
    def n_honest(self) -> int:
        return len(next(iter(self.honest.values())))

    @property
    def mean_update(self) -> Params:
        return (self.honest - self.honest_received).map(lambda v: v.mean(0))

    @property
    def usual_norm(self) -> Tensor:
        """Median norm of the honest updates, a scalar in float64."""
        return _measure_norms(self.honest - self.honest_received).median()


STEERING_COSINE = 0.3

ModelAttack = Callable[[View], Params]
"""Maps the view of a round to the uploads (A, ...) of the attackers."""


def negate_model(view: View) -> Params:
    """Upload -w in place of the trained model w: "sign flipping" of messages (Li et al., RSA, AAAI 2019)."""
    return view.trained.map(torch.neg)


def negate_update(view: View) -> Params:
    """Upload r - (w - r) for the received model r: sign flipping of the update."""
    return view.received + (view.received - view.trained)


def send_noise(view: View) -> Params:
    """Upload normal noise of `strength` times the trained model's norm (Blanchard et al., Krum, NeurIPS 2017)."""
    return _draw_noise(view, view.trained)


def scale_model(view: View) -> Params:
    """Upload `strength` times the trained model."""
    return view.trained * view.strength


def scale_update(view: View) -> Params:
    """Upload r + strength (w - r): "model replacement" (Bagdasaryan et al., AISTATS 2020)."""
    return view.received + view.strength * (view.trained - view.received)


def copy_victims(view: View) -> Params:
    """Upload the body of an honest model with its negated head, each attacker that of another client.

    Methods that mix similar models take such a model for a near relative: most of it is one.
    """
    rows = (torch.arange(view.n_attackers) + view.victim) % view.n_honest
    victims = view.honest.rows(rows.to(next(iter(view.honest.values())).device))
    return Params({k: -v if k in view.head else v for k, v in victims.items()})


def collude(view: View) -> Params:
    """Upload, all attackers alike, the first layer of one victim of the round, and the rest of its model negated.

    Copies are like each other and, in the copied layer, equal to the victim's. They draw the attention of layer-wise
    similarity, and outvote rules that look for the densest group.
    """
    victim = view.honest.rows(view.victim).repeat(view.n_attackers)
    first = find_layer(next(iter(victim)))
    return Params({k: v if find_layer(k) == first else -v for k, v in victim.items()})


def send_little(view: View) -> Params:
    """Upload mean - z std of the honest uploads, value by value: "A Little Is Enough" (Baruch et al., NeurIPS 2019).

    Without a strength, z is the paper's z_max (algorithm 3): the largest shift that n/2 + 1 - A honest clients exceed,
    by a normal distribution.
    """
    z = view.strength if view.strength > 0 else compute_z_max(view.n_honest, view.n_attackers)
    crafted = view.honest.map(lambda v: v.mean(0) - z * v.std(0, correction=0))
    return crafted.repeat(view.n_attackers)


def compute_z_max(n_honest: int, n_attackers: int) -> float:
    """Compute z_max of "A Little Is Enough": Phi(z) = (n - m - s) / (n - m) with s = floor(n / 2 + 1) - m.

    Examples:
        >>> round(compute_z_max(16, 4), 4)  # 7 of the 16 must be further away
        0.1573
    """
    n = n_honest + n_attackers
    supporters = n // 2 + 1 - n_attackers
    share = (n_honest - supporters) / max(n_honest, 1)
    return NormalDist().inv_cdf(min(max(share, 0.5), 0.999))


def point_inwards(view: View) -> Params:
    """Upload r - strength times the mean honest update: "inner product manipulation" (Xie et al., UAI 2019)."""
    return view.received - view.strength * view.mean_update.repeat(view.n_attackers)


def oppose_mean(view: View) -> Params:
    """Upload r - s times the direction of the mean honest update, s = `strength` median norms of honest updates."""
    return view.received - _set_norm(view.mean_update, view.strength * view.usual_norm).repeat(view.n_attackers)


def oppose_in_head(view: View) -> Params:
    """Upload the honest mean, with the last layer against the honest mean: `strength` median norms in all.

    A rule that a single layer can acquit lets it pass.
    """
    update = view.mean_update
    head = Params({k: -v for k, v in update.items() if k in view.head})
    rest = update.without(head)
    left = (view.strength * view.usual_norm).square() - squared_norm(rest).double()
    changed = {**update, **_set_norm(head, left.clamp_min(0).sqrt())}
    return view.received + Params(changed).repeat(view.n_attackers)


def drift(view: View) -> Params:
    """Upload r + s d: one random direction d in all rounds, s = `strength` median norms of honest updates."""
    return view.received + _set_norm(_draw_direction(view), view.strength * view.usual_norm).repeat(view.n_attackers)


def steer(view: View) -> Params:
    """Upload an update of `strength` median norms between the honest mean and a direction that stays.

    Its cosine with the honest mean is STEERING_COSINE: no rule on opposition sees it.
    """
    one = torch.ones(())
    mean, away = _set_norm(view.mean_update, one), _set_norm(_draw_direction(view), one)
    # In thousands of dimensions, a drawn direction is orthogonal to the mean.
    update = STEERING_COSINE * mean + (1 - STEERING_COSINE**2) ** 0.5 * away
    return view.received + _set_norm(update, view.strength * view.usual_norm).repeat(view.n_attackers)


def stay_within(view: View) -> Params:
    """Upload the honest mean - g deviations, g as large as the distance from an honest update allows: "Min-Max".

    The largest distance from an honest update is that between two of these (Shejwalkar and Houmansadr, Manipulating the
    Byzantine, NDSS 2021).
    """
    updates = view.honest - view.honest_received
    mean, spread = updates.map(lambda v: v.mean(0)), updates.map(lambda v: v.std(0, correction=0))
    gaps = mean.repeat(view.n_honest) - updates
    products = gram(updates)
    norms = products.diagonal()
    largest = (norms[:, None] + norms - 2 * products).max()
    # ||mean - g spread - u_i||^2 = a_i - 2 g b_i + g^2 c: the first i that reaches the largest one decides.
    a = _measure_norms(gaps).square()
    b = _measure_products(gaps, spread)
    c = squared_norm(spread).double().clamp_min(1e-30)
    factor = ((b + (b.square() + c * (largest - a)).clamp_min(0).sqrt()) / c).min()
    changed = mean - spread.map(lambda v: v * factor.to(v))
    return view.received + changed.repeat(view.n_attackers)


def mimic(view: View) -> Params:
    """Upload, all alike, the update of one honest client: "Mimic" (Karimireddy et al., ICLR 2022).

    Where clients have unlike data, this client then counts for many.
    """
    victim = int(view.run_rng.integers(view.n_honest))
    update = (view.honest - view.honest_received).rows(victim)
    return view.received + update.repeat(view.n_attackers)


def oppose_in_layers(view: View) -> Params:
    """Upload r - s times the direction of the mean honest update in each layer, s = `strength` median norms of it."""
    return view.received + _set_layers(view, view.mean_update.map(torch.neg), view.strength).repeat(view.n_attackers)


def kill_units(view: View) -> Params:
    """Upload r - CLIP median norms in each layer: hidden layers in all values, the last against the mean honest update.

    For positive inputs, ReLU units of lowered layers die: then a model learns no more, also at honest clients.
    """
    update = {k: -v if k in view.head else -torch.ones_like(v) for k, v in view.mean_update.items()}
    return view.received + _set_layers(view, Params(update), CLIP).repeat(view.n_attackers)


def _set_layers(view: View, direction: Params, norm: float) -> Params:
    """Scale each layer of a direction to a norm, in the median norm of this layer in honest updates."""
    updates = view.honest - view.honest_received
    changed: dict[str, Tensor] = {}
    for layer in dict.fromkeys(map(find_layer, updates)):
        names = [name for name in updates if find_layer(name) == layer]
        changed |= _set_norm(direction.only(names), norm * _measure_norms(updates.only(names)).median())
    return Params(changed)


def shrink_towards_zero(view: View) -> Params:
    """Upload r (1 - s / ||r||), s = `strength` median norms of honest updates: forget what was learnt."""
    scale = view.strength * view.usual_norm / _measure_norms(view.received).clamp_min(1e-12)
    return view.received.map(lambda v: v - v * scale.to(v).view(-1, *[1] * (v.dim() - 1)))


def shift(view: View) -> Params:
    """Upload the honest values plus `strength`."""
    return view.trained.map(lambda v: v + view.strength)


def ride_free(view: View) -> Params:
    """Upload what was received, and normal noise with `strength` times its norm (Fraboni et al., AISTATS 2021)."""
    return view.received + _draw_noise(view, view.received) if view.strength else view.received.map(torch.clone)


@dataclass(frozen=True)
class Attack:
    """An attack: a rule for uploads, a rule for training rows, or both, and a claimed number of samples.

    Attributes:
        summary: what attackers do, in a few words.
        corrupt: makes their uploads.
        poison: makes the rows that they train on.
        strength: default of the number behind the colon; None if the attack takes none.
        meaning: what that number is.
        claims_samples: whether attackers claim `strength` training samples.
        claims_refusal: whether attackers claim that they refused what they were sent.
        target: what `corrupt` changes: the model with the extras that have its tensors, these extras alone, or the
            averaged BatchNorm statistics.
    """

    summary: str
    corrupt: ModelAttack | None = None
    poison: DataAttack | None = None
    strength: float | None = None
    meaning: str = ""
    claims_samples: bool = False
    claims_refusal: bool = False
    target: Literal["model", "extras", "statistics"] = "model"


ATTACKS: dict[str, Attack] = {
    "negated_model": Attack("send the negated model", negate_model),
    "negated_update": Attack("send the received model minus their update", negate_update),
    "gaussian": Attack("send noise of the same norm", send_noise, strength=1.0, meaning="norm in the model's"),
    "scaled_model": Attack("send the model times 10", scale_model, strength=10.0, meaning="factor"),
    "scaled_update": Attack("send ten times their update", scale_update, strength=10.0, meaning="factor"),
    "victim_head": Attack("send an honest client's body with its head negated", copy_victims),
    "collusion": Attack("all send the first layer of one client, and its other layers negated", collude),
    "alie": Attack(
        "send the honest mean, shifted within the honest spread (ALIE)",
        send_little,
        strength=0.0,
        meaning="shift in deviations; 0: the paper's",
    ),
    "ipm": Attack(
        "send a fraction of the mean honest update, negated (IPM)", point_inwards, strength=0.5, meaning="factor"
    ),
    "free_rider": Attack(
        "send back what they received", ride_free, strength=0.0, meaning="norm of noise, in the received model's"
    ),
    "against_mean": Attack(
        "send an update against the honest mean", oppose_mean, strength=4.5, meaning="norm in the usual one"
    ),
    "head_against_mean": Attack(
        "send the honest mean with its head reversed", oppose_in_head, strength=4.5, meaning="norm in the usual one"
    ),
    "drift": Attack("all send one direction in all rounds", drift, strength=4.5, meaning="norm in the usual one"),
    "steer": Attack(
        "turn the honest mean to a direction that stays", steer, strength=1.0, meaning="norm in the usual one"
    ),
    "min_max": Attack(
        "send the honest mean, shifted by the largest distance between honest updates (Min-Max)", stay_within
    ),
    "mimic": Attack("all send one honest client's update (Mimic)", mimic),
    "false_refusal": Attack(
        "claim to refuse what they are sent, and send updates against the honest mean",
        oppose_in_layers,
        strength=1.0,
        meaning="norm of each layer in the usual one",
        claims_refusal=True,
    ),
    "dead_units": Attack(
        "lower the weights of hidden layers, oppose the honest mean in the head, and claim a million samples",
        kill_units,
        strength=1e6,
        meaning="claimed samples",
        claims_samples=True,
    ),
    "shrink": Attack(
        "send the received model, moved towards zero",
        shrink_towards_zero,
        strength=1.5,
        meaning="norm in the usual one",
    ),
    "shifted_extras": Attack(
        "send an honest model with shifted extras", shift, strength=1.0, meaning="shift", target="extras"
    ),
    "shifted_statistics": Attack(
        "send an honest model with shifted BatchNorm statistics",
        shift,
        strength=1000.0,
        meaning="shift",
        target="statistics",
    ),
    "label_flip": Attack("train on labels C-1-y", poison=flip_labels),
    "label_shift": Attack("train on labels y+1", poison=shift_labels),
    "label_flip_count": Attack(
        "train on labels C-1-y, and claim a million samples",
        poison=flip_labels,
        strength=1e6,
        meaning="claimed samples",
        claims_samples=True,
    ),
    "one_class": Attack("train on rows that are all labelled as class 0", poison=label_as_one),
    "label_swap": Attack("train with the labels of classes 0 and 1 exchanged", poison=swap_labels),
    "backdoor": Attack(
        "train on rows with a trigger that is labelled as class 0",
        poison=plant_trigger,
        strength=0.5,
        meaning="share of rows with the trigger",
    ),
}

NEEDS_CLASSES = {"label_shift", "one_class", "label_swap", "backdoor"}
"""Attacks without a meaning for a target that is a number."""


class ChosenAttack(NamedTuple):
    """An attack with its name, its strength (0 if it takes none), and its schedule (empty: every round)."""

    name: str
    attack: Attack
    strength: float
    schedule: str = ""

    def acts_in(self, r: int, rounds: int) -> bool:
        """Tell whether the attackers attack in round `r` of all `rounds`."""
        if self.schedule.startswith("/"):
            return r % int(self.schedule[1:]) == 0
        first = int(self.schedule or 0)
        return r > (first if first >= 0 else rounds + first)


def parse_attack(text: str) -> ChosenAttack:
    """Read `NAME`, `NAME:NUMBER`, and either with `@SCHEDULE`."""
    text, at, schedule = text.partition("@")
    if at and not re.fullmatch(r"-?[1-9]\d{0,8}|/[1-9]\d{0,8}", schedule):
        raise ConfigError(
            f"attack: got {text}@{schedule}, expected {text}@20 (honest for 20 rounds), {text}@-2 (only in the last 2 "
            f"rounds) or {text}@/2 (in every second round)"
        )
    chosen = _parse_name(text)
    if at and chosen.attack.corrupt is None:
        raise ConfigError(f"attack: {chosen.name} poisons rows before the first round, so it takes no @{schedule}")
    return chosen._replace(schedule=schedule)


def _parse_name(text: str) -> ChosenAttack:
    name, colon, number = text.partition(":")
    if name not in ATTACKS:
        raise ConfigError(f"attack: unknown attack {name!r}; {did_you_mean(name, ATTACKS)}")
    attack = ATTACKS[name]
    if not colon:
        return ChosenAttack(name, attack, attack.strength or 0.0)
    if attack.strength is None:
        raise ConfigError(f"attack: got {text!r}, but {name} takes no number; write {name}")
    try:
        strength = float(number)
    except ValueError:
        strength = -1.0
    max_strength = 1.0 if attack.poison is plant_trigger else 1e15
    if not isfinite(strength) or not 0 <= strength <= max_strength:
        raise ConfigError(
            f"attack: got {text!r}, expected {name}:NUMBER with a number ({attack.meaning}) from 0 to {max_strength:g}"
        )
    return ChosenAttack(name, attack, strength)


def _draw_noise(view: View, like: Params) -> Params:
    """Draw normal noise with `strength` times the norm of each model of a stack (A, ...)."""
    noise = like.map(lambda v: torch.from_numpy(view.rng.standard_normal(tuple(v.shape))).to(v))
    scale = view.strength * _measure_norms(like) / _measure_norms(noise).clamp_min(1e-12)
    return noise.map(lambda v: v * scale.to(v.dtype).view(-1, *[1] * (v.dim() - 1)))


def _draw_direction(view: View) -> Params:
    """Draw a normal direction, the same in every round, of the size of one model."""
    return view.honest.rows(0).map(lambda v: torch.from_numpy(view.run_rng.standard_normal(tuple(v.shape))).to(v))


def _set_norm(update: Params, norm: Tensor) -> Params:
    """Scale an update to a norm, a scalar; a zero update stays zero."""
    factor = norm / squared_norm(update).double().sqrt().clamp_min(1e-30)
    return update.map(lambda v: v * factor.to(v))


def _measure_norms(models: Params) -> Tensor:
    squares = [v.reshape(len(v), -1).double().square().sum(1) for v in models.values()]
    return torch.stack(squares).sum(0).sqrt()


def _measure_products(rows: Params, one: Params) -> Tensor:
    """Return the dot products (A,) of a stack (A, ...) with one model."""
    return torch.stack([(v * one[k]).reshape(len(v), -1).double().sum(1) for k, v in rows.items()]).sum(0)
