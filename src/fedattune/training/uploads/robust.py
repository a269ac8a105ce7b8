"""The step that aggregates robustly: the robust aggregate takes the place of every upload of an average."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from ...core.algorithm import ServerUpdate, find_needed_sums
from ...core.errors import ConfigError, list_some
from ...runs.context import RunContext
from ...server.mixing import Mixing
from ...server.robust import ROBUST_RULES, RobustInputs, RobustRule, aggregate_robustly, find_robust_rule
from ...server.wrapper import ServerWrapper
from .step import PastRounds, Report, RoundUploads, StepContext, UploadStep

MAX_LISTED = 10

KEEPS_UPLOADS = ("off", "rows")
"""Values of `robust` that replace no upload."""


def is_mixing(rule: ServerUpdate[Any]) -> bool:
    """Tell whether a server rule mixes a model for every client by a matrix."""
    return is_mixing(rule.inner) if isinstance(rule, ServerWrapper) else isinstance(rule, Mixing)


def find_trusted(context: RunContext) -> list[int]:
    """Return the numbers of the trusted clients."""
    robust = context.settings.defence.robust
    names = [name.strip() for name in ((robust and robust.trusted) or "").split(",") if name.strip()]
    numbers = {name: i for i, name in enumerate(context.federation.names)} if names else {}
    if unknown := [name for name in names if name not in numbers]:
        raise ConfigError(
            f"trusted: no client is called {list_some(unknown, MAX_LISTED)}; expected names of clients, such as "
            f"{list_some(list(numbers), MAX_LISTED)}"
        )
    return [numbers[name] for name in names]


@dataclass(frozen=True)
class RobustAggregation(UploadStep[None]):
    """Replace each upload by the robust aggregate, if the user wants one and the method averages.

    The rule is None if nothing replaces uploads.
    """

    name = "robust"

    rule: RobustRule | None
    share: float
    trusted: tuple[int, ...] = ()

    @classmethod
    def make(cls, context: RunContext) -> "RobustAggregation | None":
        settings, trusted = context.settings.defence, tuple(find_trusted(context))
        if settings.robust_rule == "off" and settings.max_share is None:
            return None
        rule = None if settings.robust_rule in KEEPS_UPLOADS else find_robust_rule(settings.robust_rule)
        if rule and rule.needs_trusted and not trusted:
            raise ConfigError(
                f"trusted: got nothing; robust {rule.name} needs the names of trusted clients, with commas between"
            )
        return cls(rule, settings.robust.share if settings.robust else 0.0, trusted)

    @property
    def needs(self) -> Literal["uploads", "sums"]:  # type: ignore[override]
        return "uploads" if self.rule else "sums"

    def on_server(self, state: None, uploads: RoundUploads, context: StepContext) -> tuple[None, RoundUploads]:
        params = uploads.upload.params
        can = params and find_needed_sums(context.run.algorithm.server) is not None
        if self.rule is None or not can or not params.keys() <= uploads.sent.params.keys():
            return state, uploads
        trusted = [row for row, client in enumerate(uploads.ids.tolist()) if client in self.trusted]
        inputs = RobustInputs(uploads.n, self.share, trusted)
        upload, buffers = aggregate_robustly(self.rule, uploads.sent.params, uploads.upload, uploads.buffers, inputs)
        return state, replace(uploads, upload=upload, buffers=buffers)

    def report(self, state: None, past: PastRounds, context: StepContext) -> Report:
        run, notes = context.run, []
        rule, settings = run.algorithm.server, run.settings.defence
        if not run.has_shared_parameters:
            return Report()
        averages = find_needed_sums(rule) is not None
        if settings.clip_rows and not is_mixing(rule):
            notes.append(
                "robust=rows has no effect: the method does not mix a model for every client; "
                + (f"{list_some(list(ROBUST_RULES), MAX_LISTED)} work" if averages else "no rule works")
            )
        if self.rule and not averages:
            notes.append(
                f"robust={settings.robust_rule} has no effect: the server needs single uploads, not their average; "
                + ("rows works" if is_mixing(rule) else "no rule works")
            )
        if settings.max_share is not None and not is_mixing(rule):
            notes.append("max_share has no effect: the method does not mix a model for every client by a matrix")
        return Report(notes=notes)
