"""The robust aggregation of a run: which rule goes with which method, and what the user should know of it."""

from torch import Tensor

from ...core.algorithm import ServerUpdate, find_needed_sums
from ...core.errors import ConfigError, list_some
from ...runs.context import RunContext
from ...server.mixing import Mixing
from ...server.robust import aggregate_robustly
from ...server.wrapper import ServerWrapper
from ..backends.base import TrainReply

MAX_LISTED = 10


def is_mixing(rule: ServerUpdate) -> bool:
    """Tell whether a server rule mixes a model for every client by a matrix."""
    return is_mixing(rule.inner) if isinstance(rule, ServerWrapper) else isinstance(rule, Mixing)


def find_trusted(context: RunContext) -> list[int]:
    """Return the numbers of the trusted clients.

    Raises:
        ConfigError: a name is no client's, or there is none where one is needed.

    """
    names = [name.strip() for name in (context.settings.trusted or "").split(",") if name.strip()]
    numbers = {name: i for i, name in enumerate(context.federation.names)} if names else {}
    if unknown := [name for name in names if name not in numbers]:
        raise ConfigError(
            f"trusted: no client is called {list_some(unknown, MAX_LISTED)}; expected names of clients, such as "
            f"{list_some(list(numbers), MAX_LISTED)}"
        )
    if context.settings.robust == "trust" and not names:
        raise ConfigError(
            "trusted: got nothing; robust trust needs the names of trusted clients, with commas between"
        )
    return [numbers[name] for name in names]


def replace_by_robust(context: RunContext, trusted: list[int], reply: TrainReply, n: Tensor) -> TrainReply:
    """Return the reply, each upload replaced by the robust aggregate if the user wants one and the method can."""
    rule = context.settings.robust
    if rule == "off" or rule == "rows":  # noqa: PLR1714 (narrows the type)
        return reply
    if not reply.upload.params or find_needed_sums(context.algorithm.server) is None:
        return reply
    if not reply.upload.params.keys() <= reply.sent.params.keys():
        return reply
    rows = [row for row, client in enumerate(reply.ids.tolist()) if client in trusted]
    upload, buffers = aggregate_robustly(
        rule,
        reply.sent.params,
        reply.upload,
        reply.buffers,
        n,
        share=context.settings.robust_share,
        trusted=rows,
    )
    return reply._replace(upload=upload, buffers=buffers)


def describe_defence(context: RunContext) -> list[str]:
    """Return sentences on options that do nothing for the method."""
    settings, rule, notes = context.settings, context.algorithm.server, []
    if not context.has_shared_parameters:
        return []
    averages = find_needed_sums(rule) is not None
    if settings.robust == "rows" and not is_mixing(rule):
        notes.append(
            "robust=rows has no effect: the method does not mix a model for every client; "
            + (
                "median, trimmed_mean, geometric_median, multi_krum and trust work"
                if averages
                else "no rule works"
            )
        )
    if settings.robust not in ("off", "rows") and not averages:
        notes.append(
            f"robust={settings.robust} has no effect: the server needs single uploads, not their average; "
            + ("rows works" if is_mixing(rule) else "no rule works")
        )
    if settings.max_share is not None and not is_mixing(rule):
        notes.append("max_share has no effect: the method does not mix a model for every client by a matrix")
    return notes
