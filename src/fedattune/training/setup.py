"""The preparation of a run before its first round: method, model and server are made to fit each other."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..client import find_own_steps, set_optimizer
from ..core.algorithm import Algorithm, Discardable, ServerUpdate
from ..core.errors import ConfigError
from ..core.groups import FlatSchema
from ..core.hardware import resolve_device, seed_rng
from ..core.losses import make_loss
from ..core.optimizers import PLAIN, Adam, GradientDescent, Optimizer, Schedule
from ..core.params import Params
from ..core.payload import Broadcast, ServerState
from ..core.selectors import AnyOf, BatchNorms, Selector
from ..core.settings import Settings
from ..core.targets import KIND_WORDS
from ..core.task import Task, trainable_params
from ..data import Federation
from ..data.federated import FederationInfo
from ..models.files import wrap_model
from ..models.inputs import suit_inputs
from ..models.pretrained import PretrainedNetwork
from ..runs.context import RunContext
from ..runs.rows import LazyModel, drop_laziness
from ..server.mixing import Mixing, MixtureLimits
from ..server.wrapper import ServerWrapper
from .clients.acceptance import Accepting, find_policy
from .sampling import sample_eval_ids, sample_newcomers
from .uploads.adversary import sample_attackers

ADAMW_DECAY = 0.01
"""Weight decay of AdamW where neither the user nor the method gives one: the default of `torch.optim.AdamW`."""

PRETRAINED_RATES = {"lora": 1e-3, "head": 1e-3, "all": 5e-5}
"""Trained weights of a pretrained network -> rate of AdamW; that for all weights is the default of Hugging Face."""

AnySettings = TypeVar("AnySettings", bound=FlatSchema)


@dataclass(frozen=True)
class WithNorms(Selector):
    """The tensors that the method itself keeps on clients, and the BatchNorm layers that the user keeps there."""

    own: Selector

    def names(self, model: nn.Module) -> tuple[str, ...]:
        return AnyOf((self.own, BatchNorms())).names(model)


def find_own_names(algorithm: Algorithm, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the tensors that the method itself keeps on clients, whatever the user keeps there."""
    personal = algorithm.personal
    return (personal.own if isinstance(personal, WithNorms) else personal).names(model)


def apply_settings(algorithm: Algorithm, settings: Settings) -> Algorithm:
    """Apply the user's settings for all methods alike: who trains, BatchNorm policies, limits of mixtures."""
    personal, server, optimizer = algorithm.personal, algorithm.server, make_optimizer(algorithm, settings)
    if find_policy(settings) == "harmless" and isinstance(server, Discardable):
        server = server.prepare_discards()
    if settings.training.bn_affine == "local" and personal != BatchNorms() and not isinstance(personal, WithNorms):
        personal = WithNorms(personal)
    return replace(
        algorithm,
        client=algorithm.client if optimizer == PLAIN else set_optimizer(algorithm.client, optimizer),
        server=_limit_mixtures(server, MixtureLimits(settings.defence.max_share, settings.defence.clip_rows)),
        participation=algorithm.participation.override(settings.participation.train),
        personal=personal,
        bn_buffers=algorithm.bn_buffers or settings.training.bn_buffers,
    )


def _limit_mixtures(rule: ServerUpdate[Any], limits: MixtureLimits) -> ServerUpdate[Any]:
    if isinstance(rule, ServerWrapper):
        return replace(rule, inner=_limit_mixtures(rule.inner, limits))
    return replace(rule, limits=limits) if isinstance(rule, Mixing) and limits != MixtureLimits() else rule


def make_run_context(
    algorithm: Algorithm,
    federation: Federation | FederationInfo,
    model: nn.Module,
    settings: Settings,
    *,
    excluded: Sequence[int] | None = None,
) -> RunContext:
    """Settle everything that all rounds of a run share.

    `excluded` are the clients that are never evaluated, sorted; by default those that the settings exclude.
    """
    device = resolve_device(settings)
    if excluded is None:
        excluded = sample_attackers(settings, federation)  # attackers are never evaluated
    check_augmentation(federation, settings)
    algorithm = apply_settings(algorithm, settings)
    if isinstance(federation, Federation):
        federation = suit_inputs(federation, model)
    loss = make_loss(settings.loss, federation.classes, federation.kind, federation.output_shape)
    task = Task(model, settings.execution.mixed_precision != "off", loss)
    task = task.to(device, getattr(torch, settings.execution.dtype))
    has_shared = bool(get_shared_parameters(algorithm, task))
    if (policy := find_policy(settings)) and has_shared and not isinstance(algorithm.client, Accepting):
        algorithm = replace(algorithm, client=Accepting(algorithm.client, policy))
    return RunContext(
        algorithm,
        settings,
        task,
        federation.to(device),
        all_ids=torch.arange(federation.n_clients, device=device),
        eval_ids=sample_eval_ids(settings, federation, excluded).to(device),
        n_train=federation.sizes("train").to(device),
        has_shared_parameters=has_shared,
        excluded=torch.tensor(excluded, dtype=torch.int64, device=device),
    )


def check_augmentation(federation: Federation | FederationInfo, settings: Settings) -> None:
    """Refuse to augment inputs that are no images, or whose positions have classes, which would stay in place."""
    shape = federation.input_shape
    if settings.training.augmentations and len(shape) != 3:
        raise ConfigError(
            f"augment: {settings.training.augment} is for images of the shape (channels, height, width), and the "
            f"inputs here have the shape {shape}; leave it off"
        )
    if settings.training.augmentations and federation.kind == "positions":
        raise ConfigError(
            f"augment: {settings.training.augment} moves images, and the classes of their positions would stay in "
            "place; leave it off"
        )


def get_shared_parameters(algorithm: Algorithm, task: Task) -> Params:
    """Return the initial parameters, except the ones that never leave a client."""
    return task.params.without(algorithm.personal.names(task.model))


def init_server(algorithm: Algorithm, task: Task, n_clients: int, seed: int) -> ServerState:
    """Make the server's first state, its random parts drawn from the seed alone.

    Copies of one model for every client take no memory yet: see `RowStorage.allocate_server`.
    """
    with seed_rng(seed):
        shared = LazyModel(get_shared_parameters(algorithm, task))
        return drop_laziness(algorithm.server.init(shared, n_clients))


def check_compatible(algorithm: Algorithm, server_state: ServerState, ids: Tensor) -> None:
    """Check that the server sends a `Broadcast` with the extras that the client rule needs."""
    broadcast = algorithm.server.broadcast(server_state, ids)
    if not isinstance(broadcast, Broadcast):
        raise ConfigError(
            f"{type(algorithm.server).__name__}.broadcast: got {type(broadcast).__name__}, expected a Broadcast; "
            "return Broadcast(payload), or Broadcast(payload, mixing) if the payload is a mixture of client models"
        )
    extras = broadcast.payload.extra
    missing = sorted({rule for extra, rule in algorithm.client.plan.extras.items() if extra not in extras})
    if missing:
        raise ConfigError(
            f"{type(algorithm.client).__name__} cannot go with {type(algorithm.server).__name__}, which does not send "
            f"what it needs; use the server rule {' and '.join(missing)} "
            "(a class named ...Wrapper takes your server rule as its argument)"
        )


def hold_out_newcomers(federation: Federation, settings: Settings) -> tuple[Federation, Federation | None]:
    """Divide a federation into the clients that train, and the clients that join afterwards, if there are any."""
    waiting = sample_newcomers(settings, federation)
    settings.participation.cohort_size(federation.n_clients - len(waiting))
    if not waiting:
        return federation, None
    members = federation.index
    staying = np.setdiff1d(np.arange(len(members)), waiting)
    return (
        replace(federation, clients=members.take(staying)),
        replace(federation, clients=members.take(np.array(waiting))),
    )


def build_trained_module(algorithm: Algorithm, module: nn.Module, federation: Federation, seed: int) -> nn.Module:
    """Build the model that the method trains: a copy of the user's model, or another one made from it."""
    network = algorithm.network
    if network and network.class_need and federation.kind != "class":
        what = KIND_WORDS[federation.kind]
        raise ConfigError(f"it needs classes, and the target is {what}: {network.class_need}; leave it out")
    if network and federation.kind == "positions":
        raise ConfigError(
            "it trains a network of its own, which predicts one class for a sample, and the target is a class for "
            "each position; leave it out"
        )
    if network:
        example = torch.as_tensor(federation.part("train")[0][:4], device=federation.device)
        trained_module = wrap_model(network, module, federation.features(example).cpu(), seed, federation.kind)
    else:
        trained_module = copy.deepcopy(module)
    algorithm.personal.names(trained_module)
    return trained_module


def resolve_weight_decay(algorithm: Algorithm, settings: Settings) -> float:
    """Return the l2 coefficient of gradients: the method's, or the run's, or the method's default; AdamW has none."""
    return 0.0 if settings.training.optimizer == "adamw" else _find_weight_decay(algorithm, settings)


def _find_weight_decay(algorithm: Algorithm, settings: Settings, default: float = 0.0) -> float:
    decays = (algorithm.weight_decay, settings.training.weight_decay)
    return next((decay for decay in decays if decay is not None), algorithm.default_weight_decay or default)


def settle_optimizer(
    settings: AnySettings, algorithms: Iterable[Algorithm], model: str | nn.Module, model_options: Mapping[str, Any]
) -> AnySettings:
    """Let clients train a pretrained network by AdamW if the user gives no optimizer, and every method takes one.

    Where no rate is given, that of Adam and AdamW is one that is usual for the weights that are trained.

    Raises:
        ConfigError: the optimizer has no state to keep.
    """
    settings = _prefer_adamw(settings, algorithms, model, model_options)
    if (
        settings.get("optimizer_state") == "keep"
        and settings.get("optimizer") == "sgd"
        and not settings.get("momentum")
    ):
        raise ConfigError("optimizer_state: SGD without momentum has no state to keep; add momentum, or leave it out")
    return settings


def _prefer_adamw(
    settings: AnySettings, algorithms: Iterable[Algorithm], model: str | nn.Module, model_options: Mapping[str, Any]
) -> AnySettings:
    is_pretrained = isinstance(model, PretrainedNetwork) or model == "hf"
    name = settings.get("optimizer") if {"optimizer", "momentum"} & settings.given else "adamw"
    if not is_pretrained or name == "sgd" or {"optimizer", "lr"} <= settings.given:
        return settings
    if any(find_own_steps(algorithm.client) for algorithm in algorithms):
        return settings
    tuning = model_options.get("tuning", "lora")
    if isinstance(model, nn.Module):  # constants are frozen parameters, too
        is_mostly_trained = 2 * trainable_params(model).numel() > sum(p.numel() for p in model.parameters())
        tuning = "all" if is_mostly_trained else "lora"
    rate = {} if "lr" in settings.given else {"lr": PRETRAINED_RATES[tuning]}
    return settings.replace(optimizer=name, **rate)


def check_optimizer(algorithm: Algorithm, settings: Settings) -> None:
    """Check that the method takes the optimizer of the settings.

    Raises:
        ConfigError: the method has local steps of its own.
    """
    if (optimizer := make_optimizer(algorithm, settings)) != PLAIN:
        set_optimizer(algorithm.client, optimizer)


def make_optimizer(algorithm: Algorithm, settings: Settings) -> Optimizer:
    """Make the optimizer of local steps that the settings ask for."""
    training = settings.training
    keeps_state = training.optimizer_state == "keep"
    if training.optimizer == "sgd":
        return GradientDescent(keeps_state and training.momentum > 0, training.momentum, training.nesterov)
    is_decoupled = training.optimizer == "adamw"
    decay = _find_weight_decay(algorithm, settings, ADAMW_DECAY) if is_decoupled else 0.0
    return Adam(keeps_state, training.beta1, training.beta2, training.eps, decay)


def make_schedule(settings: Settings) -> Schedule | None:
    """Make the schedule of learning rates that the settings ask for; None for a constant rate."""
    training = settings.training
    if training.lr_schedule == "constant" and not training.lr_warmup:
        return None
    step_size = training.lr_step_size or max(1, settings.rounds // 3)
    return Schedule(training.lr_schedule, settings.rounds, training.lr_warmup, step_size, training.lr_gamma)
