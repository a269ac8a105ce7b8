"""The result of a run: its numbers, and every client's model."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ..core.algorithm import Algorithm
from ..core.errors import RunError, list_some
from ..core.io import load_tensors
from ..core.params import Params, select_prefix
from ..core.payload import ServerState
from ..data.input_spec import InputSpec
from ..models import has_outside_parts
from ..models.export import ExportedModel, ExportFormat, export_model, make_file_name
from ..models.files import (
    SOURCE_KEY,
    ModelCard,
    check_preparation,
    check_reference_logits,
    compute_reference_logits,
    confirm_code,
    fill_model,
    save_model,
)
from .folder import RunFolder
from .metrics import ClientResult, JsonDict, NewcomerResult, Point, RunMetrics
from .predictions import load_predictions, save_predictions
from .rows import RowStack
from .store import RunStore

__all__ = ["ClientResult", "NewcomerResult", "Point", "Result", "TrainedServer"]


@dataclass(frozen=True)
class TrainedServer:
    """The server after training, for clients that join."""

    algorithm: Algorithm  # with what the settings decide for all methods
    module: nn.Module  # the user's model with its initial weights
    trained_module: nn.Module  # a copy of `module`, or a model that the method made from it
    state: ServerState
    statistics: Params  # averaged BatchNorm statistics; empty if they stay local
    n_clients: int  # clients that took part in training


@dataclass(frozen=True, eq=False, repr=False)
class Result(RunMetrics):
    """A finished or stopped run: its numbers, and the models of its clients at the evaluation point.

    Attributes:
        models: parameters of the evaluated clients' models, one row each, or one row if they are all the same.
        buffers: their buffers, one row each.
        module: the model that was trained; None if the run was read from its folder.
        trained_server: the server after training, for `personalize`; None likewise.
        folder: the run folder, if there is one.
        inputs: how to prepare inputs for the models.

    Examples:
        >>> import fedattune
        >>> data = fedattune.load_federation("digits", partition="dirichlet", clients=4)
        >>> result = fedattune.fit(data, "fedavg", rounds=2, out="run")
        >>> result.clients[0].id, result.n_parameters, result.mixing.last()["model"].shape
        ('0', 650, (4, 4))
        >>> Result.load("run").metrics == result.metrics
        True
        >>> type(result.model("0")).__name__
        'Sequential'
    """

    models: RowStack = field(default_factory=Params, repr=False)
    buffers: RowStack = field(default_factory=Params, repr=False)
    module: nn.Module | None = field(default=None, repr=False)
    trained_server: TrainedServer | None = field(default=None, repr=False)
    folder: Path | None = field(default=None, repr=False)
    inputs: InputSpec | None = field(default=None, repr=False)

    @classmethod
    def load(cls, path: Path | str) -> "Result":
        """Read a finished run from its folder.

        Raises:
            RunError: the folder holds no finished run, or a damaged one.
        """
        folder = RunFolder(Path(path))
        if not folder.is_finished:
            raise RunError(f"{path} holds no finished run")
        config, facts = folder.read_config(), folder.read_facts(is_finished=True)
        folder.verify(folder.metrics, folder.predictions, folder.models, folder.inputs)
        # The server of remote clients has no models.
        flat = load_tensors(folder.models)[0] if folder.models.exists() else {}
        models, buffers = (select_prefix(flat, prefix) for prefix in ("params/", "buffers/"))
        store = RunStore.open_read_only(folder.metrics)
        return cls(
            config,
            facts,
            store,
            predictions=load_predictions(folder.predictions),
            models=models,
            buffers=buffers,
            folder=folder.path,
            inputs=InputSpec.load(folder.inputs, len(facts["clients"])),
        )

    def finish(self, folder: RunFolder) -> None:
        """Write `result.json`, which makes the run a finished one."""
        facts = dict(self.facts)
        if self.predictions:
            save_predictions(folder.predictions, self.predictions)
        if has_outside_parts(self.config["model"]) and (not isinstance(self.models, Params) or self.models):
            facts["reference_logits"] = compute_reference_logits(self.model(self.eval_ids[0]), self._card(0))
        folder.finish(self.to_json() | {"facts": facts})

    def model(self, client: str | int, module: nn.Module | None = None, factory: str | None = None) -> nn.Module:
        """The model that a client predicts with after the last round, at the evaluation point.

        Args:
            client: the id of an evaluated client, or its number.
            module: a model of the same architecture to fill; needed if the run was read from its folder and trained
                a custom module.
            factory: the "file.py:factory" or "package.module:factory" that the run was trained with, if it was read
                from its folder. FedAttune runs no code because a folder names it.

        Raises:
            RunError: there is no such client, or it was not evaluated, or the code of the model is not named.
        """
        if isinstance(self.models, Params) and not self.models:
            raise RunError("the models of this run are not here: each is on its client's node, in the folder `state`")
        row = self._find_row(client)
        one_for_all = isinstance(self.models, Params) and len(next(iter(self.models.values()))) == 1
        state = {**self.models.rows(0 if one_for_all else row), **self.buffers.rows(row)}
        card: ModelCard = self._card(row)
        module = module or self.module
        if self.module is not None:  # trained in this process, which has loaded the user's code
            card = {**card, **{key: self.config[key] for key in (SOURCE_KEY,) if key in self.config}}
        if module is None:
            card = confirm_code(card, factory, self.folder or "the run")
        return fill_model(module, state, card)

    def save_models(self, folder: Path | str) -> list[Path]:
        """Write every evaluated client's model to its own safetensors file in `folder`, and return the files.

        Raises:
            RunError: the folder is not empty.
        """
        path = Path(folder)
        if path.is_dir() and any(path.iterdir()):
            raise RunError(f"{path} is not empty, and no file is overwritten; give a new folder")
        path.mkdir(parents=True, exist_ok=True)
        files = []
        for row, (number, client) in enumerate(zip(self.eval_ids, self.facts["clients"], strict=True)):
            files.append(path / f"{make_file_name(number, client['id'])}.safetensors")
            save_model(files[-1], self.model(number), self._card(row))
        return files

    def export(
        self,
        client: str | int,
        file: Path | str,
        format: ExportFormat = "safetensors",  # noqa: A002 (as the command has it)
        module: nn.Module | None = None,
        factory: str | None = None,
    ) -> ExportedModel:
        """Write a client's model for use elsewhere, and check that the file predicts the same.

        The network in the file takes prepared inputs (B, ...) and gives logits (B, classes). The file also says how to
        prepare inputs, and `fedattune.predict` does it.

        Args:
            client: the id of an evaluated client, or its number.
            file: the new file; it ends in .safetensors, .pt2 (of torch-export) or .onnx.
            format: "safetensors", "torch-export" or "onnx".
            module: see `model`.
            factory: see `model`.

        Raises:
            ConfigError: the file's ending is not the format's, or packages for ONNX are missing.
            RunError: there is no such client, the run does not say how to prepare inputs, or the model cannot be
                written in this format.
        """
        model = self.model(client, module, factory)
        card = self._card(self._find_row(client))
        check_preparation(card, f"the run of {self.algorithm}")
        if before := self.facts.get("reference_logits"):
            first = self.model(self.eval_ids[0], module, factory)
            check_reference_logits(first, card, before, self.folder or "the run")
        return export_model(Path(file), model, card, format)

    def _find_row(self, client: str | int) -> int:
        """Return the row of an evaluated client, by its id or its number."""
        names, ids = [one["id"] for one in self.facts["clients"]], self.eval_ids
        if client not in (names if isinstance(client, str) else ids):
            some = f"{len(names):,} of its {self.n_clients:,} clients were evaluated, and only their models are stored"
            which = some if len(names) < self.n_clients else "its clients are"
            raise RunError(f"no client {client!r} in this run; {which}: {list_some(names, 20)}")
        return names.index(client) if isinstance(client, str) else ids.index(client)

    def _card(self, row: int) -> JsonDict:
        """Return the card of the evaluated client in a row."""
        config = ("model", "model_options", "algorithm", "options", "data", "seed")
        card = {k: self.config[k] for k in config} | {k: self.facts[k] for k in ("input_shape", "classes")}
        card |= {k: self.facts[k] for k in ("target_kind", "target_names") if k in self.facts}
        card["client"] = self.facts["clients"][row]["id"]
        return card | (self.inputs.card(row) if self.inputs else {})
