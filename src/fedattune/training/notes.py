"""Facts and notes about a run, beside its numbers; notes are sentences that are printed under the table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from ..core.errors import list_some
from ..core.network import MethodModule
from ..core.params import Params
from ..core.payload import ServerState
from ..core.selectors import AllParameters, BatchNorms, NoParameters
from ..core.targets import describe_several
from ..data import Federation
from ..data.client_index import PARTS
from ..runs.context import RunContext
from ..runs.metrics import ABSURD_RATIO, MERGED_NAME, find_diverged
from ..runs.rows import RowStack
from ..runs.store import RoundRecord, RunStore
from ..server.wrapper import ServerWrapper
from .sampling import EVALUATE_ALL_UP_TO, sample_cohort
from .setup import resolve_weight_decay

MAX_LISTED = 5
"""Names that a sentence lists."""
MIN_SEEN_SHARE = 0.5
"""Share of a client's training rows in a round's steps below which a note tells it."""


def collect_facts(context: RunContext) -> dict[str, Any]:
    """Collect the facts that are known from the beginning of a run.

    The evaluated clients come with their samples of each class, if their data are here. `numbers` (of these clients)
    and `population` are there only if not all clients are evaluated.
    """
    ids, federation = context.eval_ids.tolist(), context.federation
    sizes = zip(*(federation.sizes(part)[context.eval_ids.cpu()].tolist() for part in PARTS), strict=True)
    facts: dict[str, Any] = {
        "evaluation_point": context.algorithm.evaluation_point,
        "early_stopping": context.early_stopping,
        "weight_decay": resolve_weight_decay(context.algorithm, context.settings),
        "n_parameters": context.task.params.numel(),
        "input_shape": list(federation.input_shape),
        "classes": list(federation.classes),
        "target_scale": federation.target_scale and federation.target_scale._asdict(),
        **describe_several(federation.kind, federation.labels, federation.outputs),
        "clients": [
            {"id": federation.names[i], "n_train": train, "n_validation": validation, "n_test": test}
            for i, (train, validation, test) in zip(ids, sizes, strict=True)
        ],
    }
    are_all = len(ids) == context.n_clients
    if isinstance(federation, Federation):
        evaluated = federation
        if not are_all:
            evaluated = replace(federation, clients=federation.index.take(context.eval_ids.cpu().numpy()))
        facts["data_notes"] = list(federation.notes)
        if federation.kind == "class":
            facts["labels"] = evaluated.label_counts().tolist()
    return facts if are_all else facts | {"numbers": ids, "population": context.n_clients}


def merge_clients(facts: Mapping[str, Any], context: RunContext) -> dict[str, Any]:
    """Put one client that stands for all in place of the clients in the facts of a run."""
    sizes = {key: sum(one[key] for one in facts["clients"]) for key in ("n_train", "n_validation", "n_test")}
    merged = {"clients": [{"id": MERGED_NAME, **sizes}], "numbers": [context.n_clients]}
    return {**facts, **merged, "population": context.n_clients}


def collect_client_scalars(context: RunContext, models: RowStack) -> dict[str, Any]:
    """Collect the values that a method's module reports of each evaluated client, as `client_scalars`.

    None stands for a value that is not finite. Without models, which stay with remote clients, there is nothing.
    """
    module, shapes = context.task.model, context.task.params
    names = module.client_scalars if isinstance(module, MethodModule) else {}
    scalars = {}
    for word, name in names.items():
        if name in models and shapes[name].numel() == 1:
            values = models.only([name]).rows(slice(0, len(context.eval_ids)))[name].flatten().tolist()
            scalars[word] = [value if isfinite(value) else None for value in values]
    return {"client_scalars": scalars} if scalars else {}


def collect_missing_facts(
    context: RunContext, records: Sequence[RoundRecord], *, is_merged: bool = False
) -> dict[str, Any]:
    """Collect the clients that were missing in some round, as `missing` (number -> name).

    All clients have a name elsewhere in the facts if all are evaluated: then there is nothing to add.
    """
    if len(context.eval_ids) == context.n_clients and not is_merged:
        return {}
    missing = sorted({i for record in records for i in (*record.diverged, *record.absent)})
    return {"missing": {str(i): context.federation.names[i] for i in missing}}


def collect_notes(
    context: RunContext, name: str, server_state: ServerState, personal: Params, store: RunStore
) -> list[str]:
    """Collect the sentences that a user should know beside the numbers of a run."""
    algorithm, records = context.algorithm, store.rounds()
    ids = sample_cohort(context.settings, context.n_clients, records[-1].round).to(context.device)
    rule: ServerWrapper[Any] = ServerWrapper(algorithm.server)
    notes = list(rule.warnings(server_state, ids))
    if algorithm.personal not in (NoParameters(), AllParameters()) and set(personal) == set(context.task.params):
        notes.append("all of this model stays on the clients, so nothing is shared: this is training alone")
    if algorithm.personal == BatchNorms() and not personal:
        notes.append("this model has no BatchNorm layers, so all of it is shared")
    is_partial = len(ids) < context.n_clients or any(record.absent for record in records)
    if algorithm.full_participation and is_partial:
        notes.append("defined for rounds in which all clients take part, which was not so here")
    notes += _note_divergence(records, context.federation.names)
    notes += _note_absurd_errors(context, store)
    notes += _note_lost_clients(store, context.federation.names)
    return [*algorithm.notes, *(f"{name}: {note}" for note in notes), *_note_settings(context, records)]


def _note_divergence(records: Sequence[RoundRecord], names: Sequence[str]) -> list[str]:
    rounds = [record for record in records if record.diverged]
    if not rounds:
        return []
    clients = sorted({i for record in rounds for i in record.diverged})
    return [
        f"in {len(rounds)} of {len(records)} rounds training diverged on clients "
        f"({list_some([names[i] for i in clients], MAX_LISTED)}): they kept the model they had and uploaded nothing; "
        "a lower learning rate would help"
    ]


def _note_absurd_errors(context: RunContext, store: RunStore) -> list[str]:
    """Name the clients whose models had finite weights and absurd errors at some evaluation."""
    ids, federation = context.eval_ids.tolist(), context.federation
    n_classes = 2 if federation.labels else len(federation.classes)
    first: dict[int, int] = {}
    for round_, point, scores in store.scores("test"):
        if point == context.algorithm.evaluation_point and len(scores[0]) == len(ids):
            for i in np.flatnonzero(find_diverged(scores, n_classes)):
                first.setdefault(ids[i], round_)
    if not first:
        return []
    names = [context.federation.names[i] for i in first]
    return [
        f"from round {min(first.values())} on, the test error of {len(names):,} client{'s' * (len(names) > 1)} "
        f"({list_some(names, MAX_LISTED)}) is not finite or above {ABSURD_RATIO:,.0f} times a constant's: training "
        f"diverged there; lower the learning rate (lr is {context.settings.training.lr:g})"
    ]


def _note_lost_clients(store: RunStore, names: Sequence[str]) -> list[str]:
    """Name the remote clients that could not be reached, or whose uploads were rejected, and why."""
    by_reason: dict[str, dict[int, set[str]]] = {}
    for round_, client, reason in store.faults():
        by_reason.setdefault(reason, {}).setdefault(round_, set()).add(names[client])
    return [
        f"round{'s' * (len(rounds) > 1)} {list_some(list(map(str, rounds)), MAX_LISTED)} without "
        f"{list_some(sorted(set().union(*rounds.values())), MAX_LISTED)}: {reason}"
        for reason, rounds in by_reason.items()
    ]


def _note_settings(context: RunContext, records: Sequence[RoundRecord]) -> list[str]:
    notes, settings = [], context.settings
    n_excluded = len(context.excluded)
    n_evaluated, n = len(context.eval_ids), context.n_clients - n_excluded
    if n_evaluated < n:
        why = "" if settings.evaluation.clients else f", the default for more than {EVALUATE_ALL_UP_TO:,}"
        notes.append(
            f"numbers are of {n_evaluated:,} of the {n:,}{' honest' * bool(n_excluded)} clients, drawn once for "
            f"all methods (--eval-clients{why})"
        )
    notes += _note_rows_seen(context)
    if settings.participation.drop_out and any(record.absent for record in records):
        notes.append(
            "clients that were asked dropped out (--drop-out): their work of these rounds was lost; local, which is "
            "asked for nothing, loses none"
        )
    concerns_norms = settings.training.bn_affine == "local" or settings.training.bn_buffers == "average"
    if concerns_norms and not context.task.bn_statistics:
        notes.append("this model has no BatchNorm layers: --bn-affine and --bn-buffers change nothing")
    return notes


def _note_rows_seen(context: RunContext) -> list[str]:
    """Say which share of the largest client's training rows the steps of a round see, if it is less than half."""
    training, sizes = context.settings.training, context.federation.sizes("train")
    if not training.local_steps or not len(sizes):
        return []
    largest = int(sizes.argmax())
    n_rows, n_seen = int(sizes[largest]), training.local_steps * training.batch_size
    if n_seen >= MIN_SEEN_SHARE * n_rows:
        return []
    return [
        f"a round of {training.local_steps} step{'s' * (training.local_steps > 1)} of {training.batch_size} "
        f"row{'s' * (training.batch_size > 1)} sees {n_seen:,} of the {n_rows:,} "
        f"training rows of the largest client, {context.federation.names[largest]} ({100 * n_seen / n_rows:.2g}%); "
        "--epochs 1 sees all rows of every client"
    ]
