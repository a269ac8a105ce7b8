"""The step that compresses uploads: top-k or 8-bit quantization of updates, with error feedback.

Sources:

    Stich et al., Sparsified SGD with memory, NeurIPS 2018, arXiv:1809.07599
    Seide et al., 1-bit stochastic gradient descent, Interspeech 2014 (error feedback)
    Karimireddy et al., Error feedback fixes SignSGD, ICML 2019, arXiv:1901.09847

With u the update of a client, theta - sent, and e its memory, which is 0 at first:

    code = C(u + e),  e = u + e - D(code),  the server reads  sent + D(code)

    topk:s   the ceil(s P) values of a tensor of P values with the largest magnitude, and their positions
    int8     round(127 v / max |v|) of every value v of a tensor, and max |v| / 127

A client that uploads in few rounds sends in a later round what it left out. Extras beside the model, and BatchNorm
statistics, travel as they are.
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.params import Params, find_layer
from ...core.payload import Payload, Traffic
from ...runs.context import RunContext
from .step import PastRounds, Report, RoundUploads, StepContext, UploadStep

DEFAULT_SHARE = 0.1
"""Share of the values that `topk` sends, unless the user says another."""

LEVELS = 127
"""Largest code of `int8`."""

SEPARATOR = "|"
"""Stands between a tensor's name and the part of its code; no name in PyTorch has it."""


def parse_compression(text: str) -> tuple[str, float]:
    """Read `int8`, `topk` or `topk:SHARE`."""
    name, colon, number = text.partition(":")
    if name == "int8" and not colon:
        return name, 1.0
    try:
        share = float(number) if colon else DEFAULT_SHARE
    except ValueError:
        share = 0.0
    if name != "topk" or not 0 < share <= 1:
        raise ConfigError(
            f"compress: got {text!r}, expected int8, or topk:SHARE with a share of the values above 0 and at most 1, "
            "such as topk:0.01"
        )
    return name, share


@dataclass(frozen=True)
class Compression(UploadStep[None]):
    """Send a code of each update in place of the model; `topk` sends a share of the values."""

    name = "compression"
    needs = "uploads"

    method: str
    share: float = 1.0

    @classmethod
    def make(cls, context: RunContext) -> "Compression | None":
        text = context.settings.uploads.compress
        return None if text is None else cls(*parse_compression(text))

    def acts(self, run: RunContext) -> bool:
        """Tell whether clients upload models, whose updates can be compressed."""
        return run.has_shared_parameters and run.algorithm.server.traits.sends_models

    def init_memory(self, context: StepContext) -> Params:
        return self._find_coded(context.run).zeros()

    def _find_coded(self, run: RunContext) -> Params:
        """Return the initial values of the tensors that travel as codes."""
        if not self.acts(run):
            return Params()
        shared = run.task.params.without(run.algorithm.personal.names(run.task.model))
        return Params({name: v for name, v in shared.items() if v.is_floating_point()})

    def on_client(self, uploads: RoundUploads, memory: Params, context: StepContext) -> tuple[RoundUploads, Params]:
        codes, left = Params(), Params(memory)
        for name, value in uploads.upload.params.items():
            if name not in memory or name not in uploads.sent.params:
                codes[name] = value
                continue
            update = value - uploads.sent.params[name] + memory[name]
            code = self.encode(update)
            codes |= {f"{name}{SEPARATOR}{part}": v for part, v in code.items()}
            left[name] = update - self.decode(code, update)
        return replace(uploads, upload=uploads.upload._replace(params=codes)), left

    def on_server(self, state: None, uploads: RoundUploads, context: StepContext) -> tuple[None, RoundUploads]:
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in uploads.upload.params.items():
            name, _, part = key.partition(SEPARATOR)
            parts.setdefault(name, {})[part] = value
        params = Params()
        for name, code in parts.items():
            sent = uploads.sent.params.get(name)
            params[name] = code[""] if "" in code or sent is None else sent + self.decode(code, sent)
        return state, replace(uploads, upload=uploads.upload._replace(params=params))

    def encode(self, update: Tensor) -> dict[str, Tensor]:
        rows = update.reshape(len(update), -1)
        if self.method == "int8":
            scale = rows.abs().amax(1) / LEVELS
            codes = (rows / scale.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]).round()
            return {"codes": codes.to(torch.int8).view(update.shape), "scale": scale}
        places = rows.abs().topk(self._count(rows.shape[1]), dim=1).indices
        return {"places": places.to(torch.int32), "values": rows.gather(1, places)}

    def decode(self, code: dict[str, Tensor], like: Tensor) -> Tensor:
        """Return the updates of a code, shaped like `like` (C, ...); rows with impossible places are not numbers."""
        if self.method == "int8":
            scale = code["scale"].view(-1, *[1] * (like.dim() - 1))
            return code["codes"].to(like.dtype) * scale.to(like.dtype)
        places, n = code["places"].long(), like[0].numel()
        is_valid = (places >= 0) & (places < n)
        rows = torch.zeros(len(like), n, dtype=like.dtype, device=like.device)
        rows.scatter_(1, places.clamp(0, n - 1), code["values"].to(like.dtype))
        rows[~is_valid.all(1)] = torch.nan
        return rows.view(like.shape)

    def _count(self, n: int) -> int:
        return max(1, ceil(self.share * n))

    def count_bytes(self, traffic: Traffic, upload: Payload, context: StepContext) -> Traffic:
        """Count the codes in place of the values, layer by layer."""
        dense, coded = Traffic(), Traffic()
        for name in self._find_coded(context.run):
            if name in upload.params:
                value = upload.params[name][0]
                size, layer = value.element_size(), find_layer(name)
                dense[layer] += value.numel() * size
                is_int8, n = self.method == "int8", self._count(value.numel())
                coded[layer] += value.numel() + size if is_int8 else n * (size + 4)
        return Traffic({k: v * coded[k] // dense[k] if dense[k] else v for k, v in traffic.items()})

    def report(self, state: None, past: PastRounds, context: StepContext) -> Report:
        run = context.run
        if not run.has_shared_parameters:
            return Report()
        option = f"--compress {run.settings.uploads.compress}"
        if not self.acts(run):
            note = f"uploads were not compressed ({option}): they are no models, which alone have updates"
            return Report(notes=[note])
        how = "8 bits for a value" if self.method == "int8" else f"{100 * self.share:g}% of the values"
        note = f"uploads were compressed with error feedback ({option}): {how}"
        return Report({"method": self.method, "share": self.share}, [note])
