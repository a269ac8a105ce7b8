"""One node of a real federation: its data, its clients' memory on its own disk, and what it answers."""

import copy
import hashlib
import os
import re
import traceback
from collections.abc import Mapping
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
from ...core.io import flatten_tree
from ...core.params import Params
from ...data import infer_schema, load_node
from ...data.client_index import PARTS
from ...data.combine import renumber_clients
from ...data.input_spec import make_input_card
from ...models.files import fill_model, rebuild_model, save_model, wrap_model
from ...training.backends.local import LocalBackend
from ...training.backends.message import WorkerMessage
from ...training.backends.worker import export_state, handle_message, load_state, open_backend
from ...training.storage.rows import load_rows
from .config import DeploymentPlan, Scalar
from .state import LostStateError, NodeState


class NodeRuntime:
    """A node with its clients; it is made anew for every message, and remembers by its folder alone.

    Args:
        node_config: where its data are (see `fedattune.data.load_node`), and the folder `state` of what it remembers;
            without that, the environment's FEDATTUNE_STATE.
        run_config: that of the run, the same for all.
        own: methods of the user's own, by name.

    """

    def __init__(
        self,
        node_config: Mapping[str, Scalar],
        run_config: Mapping[str, Scalar],
        own: Mapping[str, Algorithm] | None = None,
    ) -> None:
        self.config = dict(node_config)
        self.folder = Path(str(self.config.get("state") or os.environ.get("FEDATTUNE_STATE", "state")))
        self._run_config, self._own = run_config, own

    def answer(self, parcel: WorkerMessage) -> WorkerMessage:
        """Do what a parcel says; a failure is told by its kind alone, for its text may hold data."""
        try:
            self.plan = DeploymentPlan(self._run_config, self._own)
            self._load()
            return self._hello() if parcel.head["kind"] == "hello" else self._serve(parcel)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            print(f"fedattune: {error if isinstance(error, FedAttuneError) else text}", flush=True)
            with suppress(OSError):  # it, too, would be told
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / "error.log").write_text(text, encoding="utf-8")
            return WorkerMessage({"kind": "failed", "error": type(error).__name__})

    def _load(self) -> None:
        experiment, schema = self.plan.experiment, self.plan.deployment.data_schema
        data = load_node(
            self.config,
            schema,
            test=experiment.test,
            validation=experiment.validation,
            seed=experiment.split_seed or 0,
            data_dir=experiment.data_dir,
        )
        self.federation, self.numbers = data.federation, data.numbers
        self.schema = schema or infer_schema(data.federation)

    def _hello(self) -> WorkerMessage:
        """Who its clients are, and what their data are like; no data."""
        sizes = [self.federation.sizes(part).tolist() for part in PARTS]
        clients = [
            {"name": name, "number": number, "sizes": list(mine)}
            for name, number, *mine in zip(self.federation.names, self.numbers, *sizes, strict=True)
        ]
        return WorkerMessage(
            {
                "kind": "hello",
                "name": str(self.config.get("name", "")),
                "fedattune": __version__,
                "clients": clients,
                "schema": self.schema.to_json(),
            }
        )

    def _serve(self, parcel: WorkerMessage) -> WorkerMessage:
        head = parcel.head
        name, seed, r = head["algorithm"], head["seed"], head["round"]
        known = name in self.plan.algorithms and re.fullmatch("[0-9a-f]{8,64}", head["token"])
        if not known or not isinstance(seed, int) or not isinstance(r, int):  # they name a folder here
            raise ConfigError(f"the server asks for a run of {name!r} that is not in the run configuration")
        algorithm, settings = self.plan.algorithms[name], self.plan.settings(seed)
        card = self.plan.card(name, seed, self.federation.input_shape, self.federation.classes)
        module = build_trained_model(algorithm, card)
        if hash_model(module) != head["model"]:
            raise ConfigError(
                "the initial model is not that of the server: both need the same model, and versions of PyTorch "
                "that draw the same numbers"
            )
        site, names = self._site(algorithm, module, settings, head)
        memory = NodeState(self.folder / head["token"] / name / f"seed-{seed}")
        with memory.alone(head["number"]):
            last = max(head["last"])
            state, remembered = memory.recall(head["last"], Params(flatten_tree(export_state(site))))
            if head.get("is_answered") and remembered != last and set(head.get("pending", ())) < set(names):
                raise LostStateError("the server takes this node to have been sent what it has not")
            if state is not None:
                load_state(site, state)
            reply = handle_message(site, parcel)
            memory.keep(r, export_state(site))
            self._save_models(site, names, memory.folder / "models", {**card, "data": self.federation.name})
        reply.head.update({key: head[key] for key in ("token", "algorithm", "seed", "round")})
        reply.head["remembered"] = remembered
        return reply

    def _site(
        self, algorithm: Algorithm, module: nn.Module, settings: Any, head: Mapping[str, Any]
    ) -> tuple[LocalBackend, dict[int, str]]:
        """The site with its clients under the numbers that the server gave them, and their names by number."""
        theirs: dict[str, int] = head["clients"]
        missing = [name for name in self.federation.names if name not in theirs]
        if missing or len(theirs) != self.federation.n_clients:
            raise RunError(
                f"the node's clients are {', '.join(self.federation.names)}, and the server expects "
                f"{', '.join(theirs)}: the data changed since the run began"
            )
        members = np.array([theirs[name] for name in self.federation.names])
        order = members.argsort()
        clients = self.federation.index.take(order)
        seed = self.plan.experiment.split_seed or 0  # by which the evaluated clients are drawn
        mine = replace(self.federation, clients=clients, partition={"seed": seed})
        data = renumber_clients(mine, members[order], int(head["n_clients"]))
        settings = settings.model_copy(update={"client_state": "memory"})
        site = open_backend(algorithm, data, module, settings, members.tolist(), planned_rounds=1)
        return site, {number: name for name, number in theirs.items()}

    def _save_models(
        self, site: LocalBackend, names: Mapping[int, str], folder: Path, card: dict[str, Any]
    ) -> None:
        """Write the model of each client that was evaluated now, for use."""
        models, buffers = (load_rows(stack) for stack in site.headline_models)
        if not models:
            return
        prepared = self.federation.preparation
        for row, number in enumerate(site.evaluation.eval_ids.tolist()):
            state = {**models.rows(row), **buffers.rows(row)}
            folder.mkdir(parents=True, exist_ok=True)
            safe = re.sub(r"[^A-Za-z0-9_.-]", "_", names[number])[:100]
            one = {
                **card,
                "client": names[number],
                **make_input_card(self.schema, prepared.get(names[number])),
            }
            save_model(
                folder / f"{number:04d}-{safe}.safetensors",
                fill_model(site.context.task.model, state, one),
                one,
            )


def build_trained_model(algorithm: Algorithm, card: Mapping[str, Any]) -> nn.Module:
    """What a run trains, with its initial weights: the model of the card, or what the method makes of it."""
    module = rebuild_model(card)
    if algorithm.network:
        return wrap_model(algorithm.network, module, torch.zeros(2, *card["input_shape"]), card["seed"])
    return copy.deepcopy(module)


def hash_model(module: nn.Module) -> str:
    """Sixteen hex digits of all weights and buffers."""
    found = hashlib.sha256()
    for name, value in sorted({**dict(module.named_parameters()), **dict(module.named_buffers())}.items()):
        found.update(
            name.encode() + value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()[:16]
