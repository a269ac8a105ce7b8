"""One node of a deployment: its data, the state of its clients, and its replies to the server."""

import copy
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..._version import __version__
from ...core.algorithm import Algorithm
from ...core.errors import ConfigError, FedAttuneError, RunError
from ...core.io import clean_file_name, flatten_tree, write_text
from ...core.params import Params
from ...data import infer_schema, load_node
from ...data.client_index import PARTS, hash_clients
from ...data.federated import FederationInfo, renumber_clients
from ...data.input_spec import make_input_card
from ...data.on_disk import hash_samples
from ...models.files import fill_model, get_kind, make_zero_inputs, rebuild_model, save_model, wrap_model
from ...models.inputs import suit_inputs
from ...runs.rows import load_rows
from ...training.backends.local import LocalBackend
from ...training.backends.message import WorkerMessage, split_message
from ...training.backends.worker import export_state, handle_message, load_state, open_backend
from ...training.clients.options import check_method
from ...training.uploads.pipeline import find_noise
from ..config import DeploymentPlan, Scalar
from ..logs import open_log
from ..operate.audit import AuditLog, AuditLogError, count_bytes
from ..secagg import SecureAggregationRequiredError
from ..secagg.layout import list_uploading
from ..secagg.methods import find_weightings
from ..secagg.runtime import KINDS, TRAINING_KIND, SecureSteps, read_rules
from .files import LostStateError, NodeState, mark_current, report_error, retire_errors
from .policy import OTHER_KEYS, NodePolicy

TASKS = ("train", "evaluate")
"""Kinds of messages that a node handles. A worker of one's own cluster also sends its clients' states and models."""

ORDER_KEYS = {"ids", "cohort", "dropouts", "resting", "pending"}
"""Lists of clients in the head of a message."""


CHANGED = "the data changed since the run began"


class NodeRuntime:
    """A node with its clients. Flower makes a new one for every message; only its folder survives.

    Its configuration names its data (see `fedattune.data.load_node`) and the folder `state`, by default the
    environment's FEDATTUNE_STATE. The configuration of the run is the same for all nodes.
    """

    def __init__(
        self,
        node_config: Mapping[str, Scalar],
        run_config: Mapping[str, Scalar],
        custom_algorithms: Mapping[str, Algorithm] | None = None,
    ) -> None:
        self.config = dict(node_config)
        self.folder = Path(str(self.config.get("state") or os.environ.get("FEDATTUNE_STATE", "state")))
        self._run_config, self._custom_algorithms = run_config, custom_algorithms
        self.audit = AuditLog(self.folder)
        log_format = self.config.setdefault("log-format", os.environ.get("FEDATTUNE_LOG_FORMAT", "text"))
        # The policy refuses another format, and this refusal must reach the operator in some format.
        open_log("node", "json" if log_format == "json" else "text", node=self.config.get("name"))

    def answer(self, message: WorkerMessage) -> WorkerMessage:
        """Handle a message. The reply names only the kind of an error, because its text may hold data."""
        try:
            self.audit.append("in", message, message.head)
            self.policy = NodePolicy.read(self.config)
            self.plan = DeploymentPlan(self._run_config, self._custom_algorithms)
            is_hello = message.head["kind"] == "hello"
            is_step = message.head["kind"] in KINDS - {TRAINING_KIND}  # of a session, without data
            if not is_step:
                self._load_data()
            reply = self._introduce() if is_hello else self._handle(message)
            if not (is_hello or is_step):  # they say nothing about what failed in training
                retire_errors(self.folder)
            self.audit.append("out", reply, message.head)  # last: the reply that it names is sent
            return reply
        except Exception as error:
            report_error(self.folder, error, message.head)
            reply = WorkerMessage({"kind": "failed", "error": type(error).__name__})
            if not isinstance(error, AuditLogError):
                with suppress(Exception):  # its text would be in the reply
                    self.audit.append("out", reply, message.head)
            return reply

    def _load_data(self) -> None:
        experiment, schema = self.plan.experiment, self.plan.deployment.data_schema
        try:
            shares: Any = {"test": experiment.test, "validation": experiment.validation}
            seed, data_dir = experiment.split_seed or 0, experiment.data_dir
            data = load_node(self.config, schema, **shares, seed=seed, data_dir=data_dir, other_keys=OTHER_KEYS)
        except Exception as error:
            raise self.policy.hide_problem(self.folder, schema.to_json() if schema else None, error) from error
        self.federation, self.numbers = data.federation, data.numbers
        self.schema = schema or infer_schema(data.federation)

    def _introduce(self) -> WorkerMessage:
        self.policy.check_run(self.plan.algorithms, self.plan.experiment.rounds)
        self.policy.check_privacy(self.plan.settings(0))
        return WorkerMessage(self._describe_data())

    def _describe_data(self) -> dict[str, Any]:
        """Describe names and sizes of the clients and the schema of their data, if the node's operator approved it."""
        sizes = [self.federation.sizes(part).tolist() for part in PARTS]
        clients = [
            {"name": name, "number": number, "sizes": list(mine)}
            for name, number, *mine in zip(self.federation.names, self.numbers, *sizes, strict=True)
        ]
        shared = {"name": str(self.config.get("name", "")), "clients": clients}
        schema = self.schema.to_json()
        self.policy.check_consent(self.folder, {**shared, "schema": json.loads(schema)})
        return {"kind": "hello", **shared, "schema": schema, "fedattune": __version__}

    def _handle(self, message: WorkerMessage) -> WorkerMessage:
        head = message.head
        name, seed, r = head["algorithm"], head["seed"], head["round"]
        is_known = name in self.plan.algorithms and re.fullmatch("[0-9a-f]{8,64}", head["token"])
        if not is_known or not isinstance(seed, int) or not isinstance(r, int):  # they name a folder here
            raise ConfigError(f"the server asks for a run of {name!r} that is not in the run configuration")
        is_secure, options = head["kind"] in KINDS, self.plan.deployment
        if not is_secure and (self.policy.secure_aggregation == "required" or options.secure_aggregation):
            raise SecureAggregationRequiredError(
                f"the server asks for {head['kind']!r:.40}, and this node takes part in secure sums only "
                "(`secure-aggregation`)"
            )
        self.policy.check_run([name], r)
        state = NodeState(self.folder / head["token"] / name / f"seed-{seed}")
        with state.lock(head["number"]):
            if is_secure:
                sums = find_weightings(name, self.plan.algorithms[name], self.plan.settings(seed))
                rules = read_rules(self.policy)
                bits, clip = options.secure_bits, options.secure_clip
                steps = SecureSteps(state.folder, rules, sums, bits, clip, self.plan.digest)
                reply = steps.answer(message, lambda inner: self._work(inner, state))
            else:
                _, reply = self._work(message, state)
        reply.head.update({key: head[key] for key in ("token", "algorithm", "seed", "round")})
        self.policy.count_sent(self.folder / head["token"], count_bytes(reply))
        mark_current(self.folder, head["token"])
        return reply

    def _work(self, message: WorkerMessage, state: NodeState) -> tuple[LocalBackend, WorkerMessage]:
        """Train and evaluate the clients from their state on the disk; return their backend, and the reply."""
        head = message.head
        name, seed = head["algorithm"], head["seed"]
        parts = split_message(message)
        if odd := {str(part.head.get("kind")) for part in parts} - set(TASKS):
            raise ConfigError(
                f"the server asks for {min(odd)!r:.40}; a node only trains and evaluates, as its models stay with it"
            )
        r = max(part.head["round"] for part in parts)
        self.policy.check_run([name], r)
        self.policy.check_privacy(self.plan.settings(seed))
        self._describe_data()  # what leaves with a model needs the same consent
        algorithm = self.plan.algorithms[name]
        card = self.plan.card(name, seed, self.federation)
        module = build_initial_model(algorithm, card)
        if hash_model(module) != head["model"]:
            raise ConfigError(
                "the initial model differs from the server's; both need the same model, and versions of PyTorch that "
                "draw the same numbers"
            )
        backend = self._open_backend(algorithm, module, head)
        self._check_rows(state.folder.parents[1])  # the run's folder, for all of its methods and seeds
        check_orders(parts, backend.client_ids.tolist())
        names = {number: client for client, number in head["clients"].items()}
        last = max(head["last"])
        saved, loaded = state.load(head["last"], Params(flatten_tree(export_state(backend))))
        if head.get("replies_immediately") and loaded != last and set(head.get("pending", ())) < set(names):
            raise LostStateError("the server expects a state that this node does not have")
        if saved is None:
            check_method(algorithm, module, self.plan.settings(seed), suit_inputs(self.federation, module))
        self._count_spending(backend, state.folder, parts)
        uploads = sum(bool(list_uploading(part)) for part in parts if part.head["kind"] == "train")
        noise = find_noise(backend.upload_steps)
        if uploads and noise and backend.context.has_shared_parameters:
            self.policy.count_uploads(state.folder, uploads, noise.accounting)
        if saved is not None:
            load_state(backend, saved)
        reply = handle_message(backend, message)
        state.save(head["round"], export_state(backend))
        self._save_models(backend, names, state.folder / "models", {**card, "data": self.federation.name})
        reply.head["loaded"] = loaded
        return backend, reply

    def _open_backend(self, algorithm: Algorithm, module: nn.Module, head: Mapping[str, Any]) -> LocalBackend:
        """Open a backend whose clients have the server's numbers."""
        numbers: dict[str, int] = head["clients"]
        missing = [name for name in self.federation.names if name not in numbers]
        if missing or len(numbers) != self.federation.n_clients:
            raise RunError(
                f"the node's clients are {', '.join(self.federation.names)}, and the server expects "
                f"{', '.join(numbers)}: {CHANGED}"
            )
        members = np.array([numbers[name] for name in self.federation.names])
        order = members.argsort()
        clients = self.federation.index.take(order)
        seed = self.plan.experiment.split_seed or 0  # by which the evaluated clients are drawn
        mine = replace(self.federation, clients=clients, partition={"seed": seed})
        data = renumber_clients(mine, members[order], int(head["n_clients"]))
        settings = self.plan.settings(head["seed"]).replace(client_state="memory")
        return open_backend(algorithm, data, module, settings, members.tolist(), is_one_message=True)

    def _check_rows(self, folder: Path) -> None:
        """Check that rows and parts are those of the run's first message: a test row must never become a training row.

        Parts are drawn by the positions of rows, so the same rows in another order have other parts of equal sizes.
        """
        data = self.federation
        # Of one table, the rows before each client scaled its numbers: rounding may differ on another machine.
        rows = data.source or hash_samples(data.x, data.y.cpu().numpy())
        digest = hash_clients({"rows": rows}, {}, data.index)
        file = folder / "data.sha256"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, f"{digest}\n")
        elif file.read_text(encoding="utf-8").strip() != digest:
            raise RunError(
                f"the rows in {self.config['data']}, or their split into train, validation and test, are not those of "
                f"the run's first message, whose SHA-256 is in {file}: {CHANGED}; bring the same rows back in the same "
                "order, or ask the server's operators for a run in a new run-folder"
            )

    def _count_spending(self, backend: LocalBackend, folder: Path, parts: Sequence[WorkerMessage]) -> None:
        """Count trainings, and fine-tunings where rows are private: each of them spends epsilon of the node's rows.

        The noise is made for the planned rounds. So the node does not train more often, whatever the server asks: a
        round whose reply was lost is spent.
        """
        settings = backend.context.settings
        is_private = settings.privacy.record is not None
        trained = sum(bool(part.head.get("ids")) for part in parts)
        self.policy.count_trained(folder, trained, settings.rounds if is_private else None)
        if is_private and backend.context.algorithm.fine_tune:
            tuned = sum(part.head.get("kind") == "evaluate" for part in parts)
            self.policy.count_trained(folder / "fine-tuned", tuned, backend.planned_evaluations)

    def _save_models(self, backend: LocalBackend, names: Mapping[int, str], folder: Path, card: dict[str, Any]) -> None:
        models, buffers = (load_rows(stack) for stack in backend.evaluated_models)
        if not models:
            return
        prepared = self.federation.preparation
        for row, number in enumerate(backend.evaluation.eval_ids.tolist()):
            state = {**models.rows(row), **buffers.rows(row)}
            inputs = make_input_card(self.schema, prepared.get(names[number]))
            own_card = {**card, "client": names[number], **inputs}
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{number:04d}-{clean_file_name(names[number][:60])}.safetensors"
            save_model(file, fill_model(backend.context.task.model, state, own_card), own_card)


def check_orders(parts: Sequence[WorkerMessage], members: Sequence[int]) -> None:
    """Check that messages name only clients of this node, and each of them once.

    What the node counts and signs follows from these lists, and other code reads them as numbers of its clients.
    """
    for part in parts:
        for key in ORDER_KEYS & part.head.keys():
            ids = part.head[key]
            is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
            if not is_list or ids != sorted(set(members).intersection(ids)):
                raise ConfigError(
                    f"round {part.head['round']}: the server's {key} is {ids!r:.80}, expected a sorted list of "
                    f"different clients of this node, which are {list(members)!r:.80}"
                )


def build_initial_model(algorithm: Algorithm, card: Mapping[str, Any]) -> nn.Module:
    """Build the model that a run trains: the card's model with its initial weights, or the method's version of it."""
    module = rebuild_model(card)
    if algorithm.network:
        return wrap_model(algorithm.network, module, make_zero_inputs(card, 2), card["seed"], get_kind(card))
    return copy.deepcopy(module)


def check_methods(plan: DeploymentPlan, info: FederationInfo) -> None:
    """Check every method of a plan, with its initial model, before any node trains.

    Raises:
        ConfigError: a method does not suit the settings, the model or the data; the message names the method.
    """
    seed = plan.seeds[0]
    for name, algorithm in plan.algorithms.items():
        try:
            module = build_initial_model(algorithm, plan.card(name, seed, info))
            algorithm.personal.names(module)
            check_method(algorithm, module, plan.settings(seed), info)
        except FedAttuneError as error:
            raise ConfigError(f"{name}: {error}") from error


def hash_model(module: nn.Module) -> str:
    """Compute sixteen hex digits of all weights and buffers."""
    hasher = hashlib.sha256()
    for name, value in sorted({**dict(module.named_parameters()), **dict(module.named_buffers())}.items()):
        hasher.update(name.encode() + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]
