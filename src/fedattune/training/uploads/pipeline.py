"""The pipeline of uploads from the clients to the server rule: one order of steps for simulations and deployments.

At the server, from the first to the last; where the clients are, from the last to the first:

    compression  with `--compress`, updates travel as codes
    attack       with `--attack`, the attackers of a simulation corrupt what they upload
    noise        with `--dp-client`, updates are clipped and noised, at the clients or at a trusted server
    screening    uploads that no honest client sends are rejected, and claimed sample counts are bounded
    custom       with `--upload-steps`, custom steps
    robust rule  with `--robust`, the robust aggregate takes the place of every upload of an average

The noise comes before all that looks at uploads, which is post-processing of what is private already. Noise that is
made for the sum of all uploads protects this sum only: nothing may then depend on single uploads, so these are not
screened. Under secure aggregation there are none to look at.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.own_code import load_function
from ...core.params import Params, select_prefix
from ...core.payload import Payload, Traffic
from ...core.settings import Settings
from ...data import Federation
from ...data.federated import FederationInfo
from ...privacy.noise import limit_variances
from ...runs.context import RunContext
from ...runs.rows import RowStack
from ...server.robust import find_robust_rule
from .adversary import Attack, check_attack
from .client_privacy import ClientPrivacy
from .compression import Compression, parse_compression
from .robust import KEEPS_UPLOADS, RobustAggregation
from .screening import Screening
from .step import PastRounds, RoundUploads, StepContext, UploadStep, dump_state, load_state

Step = TypeVar("Step", bound=UploadStep[Any])

BUILT_IN = tuple(step.name for step in (Compression, Attack, ClientPrivacy, Screening, RobustAggregation))
"""Names of the steps that no custom step takes."""


def check_upload_steps(settings: Settings, federation: Federation | FederationInfo | None = None) -> None:
    """Check the settings of all steps, and whether they suit the data if these are known."""
    check_attack(settings, federation)
    if settings.uploads.compress is not None:
        parse_compression(settings.uploads.compress)
    if settings.defence.robust_rule not in KEEPS_UPLOADS:
        find_robust_rule(settings.defence.robust_rule)
    load_custom_steps(settings)


def list_single_upload_options(settings: Settings) -> list[str]:
    """List the options that look at single uploads at the server, as their users write them."""
    noise, defence = settings.privacy.client, settings.defence
    given = {
        "dp-client-where central": noise is not None and noise.where == "central",
        "robust": defence.robust_rule != "off",
        "max-share": defence.max_share is not None,
        "compress": settings.uploads.compress is not None,
        "upload-steps": settings.uploads.steps is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def load_custom_steps(settings: Settings) -> list[UploadStep[Any]]:
    """Load the steps that the user names."""
    steps = []
    for name in filter(None, map(str.strip, (settings.uploads.steps or "").split(","))):
        step = load_function(name, "the upload step")()
        if not isinstance(step, UploadStep):
            raise ConfigError(
                f"upload_steps: {name} returned {type(step).__name__}, expected an UploadStep (a class derived from "
                "fedattune.UploadStep, or a function that returns one)"
            )
        steps.append(step)
    taken = [*BUILT_IN, *(step.name for step in steps)]
    if twice := [step.name for step in steps if taken.count(step.name) > 1]:
        raise ConfigError(
            f"upload_steps: two steps are called {twice[0]!r}, by which reports are kept; set `name` in the class"
        )
    return steps


def _make_custom_steps(run: RunContext) -> list[UploadStep[Any]]:
    """Return the user's steps for this run; they need not expect that a method, such as local, uploads nothing."""
    return load_custom_steps(run.settings) if run.has_shared_parameters else []


def make_client_steps(context: StepContext) -> tuple[UploadStep[Any], ...]:
    """Return the steps that have a part where the clients are, in the order of their client hooks."""
    run = context.run
    return _drop_none(
        *reversed(_make_custom_steps(run)),
        ClientPrivacy.make(run, is_secret=context.is_deployed),
        Attack(run) if len(run.excluded) else None,
        Compression.make(run),
    )


def find_noise(steps: tuple[UploadStep[Any], ...]) -> ClientPrivacy | None:
    """Return the step that adds noise at the clients; None if there is none."""
    return next((step for step in steps if isinstance(step, ClientPrivacy) and not step.is_central), None)


def encode_example(run: RunContext, sent: Payload, upload: Payload) -> Payload:
    """Return the upload of one client as it travels; only its names, types and shapes mean anything."""
    step, context = Compression.make(run), StepContext(run)
    if step is None:
        return upload
    one = torch.ones(1, dtype=torch.int64, device=run.device)
    sent, upload = (payload.map(lambda part: part.repeat(1)) for payload in (sent, upload))
    uploads = RoundUploads(0, one, sent, upload, Params(), one)
    coded, _ = step.on_client(uploads, step.init_memory(context).repeat(1), context)
    return coded.upload.rows(0)


def _drop_none(*steps: Step | None) -> tuple[Step, ...]:
    return tuple(step for step in steps if step is not None)


class UploadPipeline:
    """The steps of a run at the server, in the order in which uploads pass them, with their states."""

    def __init__(self, context: StepContext) -> None:
        run = context.run
        attack = Attack(run) if len(run.excluded) else None
        custom, robust = _make_custom_steps(run), RobustAggregation.make(run)
        needs_uploads = any(step.needs == "uploads" for step in _drop_none(*custom, robust))
        noise = ClientPrivacy.make(run, needs_uploads=needs_uploads, is_secret=context.is_deployed)
        compression = Compression.make(run)
        for step in _drop_none(*custom, robust, compression):
            if step.needs == "uploads" and not context.sees_uploads:
                raise ConfigError(
                    f"the upload step {step.name} needs single uploads, and the server sees only their sum; "
                    "leave out one of the two"
                )
        self._context = replace(
            context,
            counts_are_claimed=context.counts_are_claimed or attack is not None,
            sees_uploads=context.sees_uploads and not (noise and noise.is_sum),
        )
        self.steps: tuple[UploadStep[Any], ...] = _drop_none(
            compression, attack, noise, Screening(self._context), *custom, robust
        )
        self._states = [step.init(self._context) for step in self.steps]
        self.dump()  # an error now costs no round

    @property
    def adds_noise(self) -> bool:
        return any(step.adds_noise for step in self.steps)

    def receive(self, uploads: RoundUploads) -> RoundUploads:
        for i, step in enumerate(self.steps):
            if not len(uploads.ids):
                break
            try:
                self._states[i], uploads = step.on_server(self._states[i], uploads, self._context)
            except Exception as error:
                error.add_note(f"in the upload step {step.name}, round {uploads.round}")
                raise
        return uploads

    def finish_statistics(self, mean: Params) -> Params:
        """Return averaged BatchNorm statistics whose variances are positive in spite of noise."""
        return limit_variances(mean) if self.adds_noise else mean

    def count_bytes(self, traffic: Traffic, upload: Payload) -> Traffic:
        """Return the bytes that clients uploaded, given those of uploads that no step changed."""
        for step in self.steps:
            traffic = step.count_bytes(traffic, upload, self._context)
        return traffic

    def collect_facts(self) -> dict[str, Any]:
        return {key: value for step in self.steps for key, value in step.collect_facts().items()}

    def report(self, past: PastRounds) -> tuple[dict[str, Any], list[str], list[str]]:
        """Collect the reports: name -> facts; sentences about the method; sentences about all methods alike."""
        found = [
            (step.name, step.report(state, past, self._context))
            for step, state in zip(self.steps, self._states, strict=True)
        ]
        return (
            {name: dict(report.facts) for name, report in found if report.facts},
            [note for _, report in found for note in report.notes],
            [note for _, report in found for note in report.common_notes],
        )

    def measure(self, models: RowStack, buffers: RowStack) -> tuple[dict[str, Any], list[str]]:
        found = [(step.name, step.measure(models, buffers, self._context)) for step in self.steps]
        facts = {name: dict(report.facts) for name, report in found if report.facts}
        return facts, [note for _, report in found for note in report.notes]

    def dump(self) -> tuple[str, dict[str, Any]]:
        """Return the steps' states as JSON, and the tree of their tensors, by step and field."""
        pairs = zip(self.steps, self._states, strict=True)
        stored = {step.name: dump_state(step, state) for step, state in pairs if state is not None}
        tree = {name: one.tensors for name, one in stored.items()}
        return json.dumps({name: one.values for name, one in stored.items()}), {"upload_steps": tree}

    def load(self, text: str, flat: Mapping[str, Tensor]) -> None:
        """Put the states back to those of a checkpoint: what `dump` returned, and tensors by path."""
        values, device = json.loads(text), self._context.run.device
        for i, step in enumerate(self.steps):
            if step.name in values:
                tensors = select_prefix(flat, f"upload_steps/{step.name}/").map(lambda v: v.to(device, copy=True))
                self._states[i] = load_state(self._states[i], values[step.name], tensors)
