"""What a user should know about a run beside its numbers: sentences that are printed under the table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.selectors import AllParameters, BatchNorms, NoParameters
from ..data import Federation
from ..data.client_index import PARTS
from .sampling import EVALUATE_ALL_UP_TO, sample_cohort
from .storage import RoundRecord

if TYPE_CHECKING:
    from .loop import RoundLoop


def collect_client_facts(run: "RoundLoop") -> dict[str, Any]:
    """What a result says of the evaluated clients, with their samples of each class where the data are here.

    `numbers` (theirs) and `population` are there only where not all clients are evaluated.
    """
    judged, federation = run.judged.tolist(), run.federation
    sizes = [federation.sizes(part)[run.judged.cpu()].tolist() for part in PARTS]
    names = [federation.names[i] for i in judged]
    clients = [
        {"id": name, "n_train": train, "n_validation": validation, "n_test": test}
        for name, train, validation, test in zip(names, *sizes, strict=True)
    ]
    facts: dict[str, Any] = {"clients": clients}
    if isinstance(federation, Federation):
        members = federation
        if len(judged) < federation.n_clients:
            members = replace(federation, clients=federation.index.take(run.judged.cpu().numpy()))
        facts |= {"labels": members.label_counts().tolist(), "data_notes": list(federation.notes)}
    if len(judged) == federation.n_clients:
        return facts
    return facts | {"numbers": judged, "population": federation.n_clients}


def collect_missing_facts(run: "RoundLoop") -> dict[str, Any]:
    """Who was missing in some round, as `missing` (number -> name), where not all clients are evaluated."""
    federation = run.federation
    if len(run.judged) == federation.n_clients:
        return {}
    records = run.store.rounds()
    missing = sorted({i for record in records for i in (*record.dropped, *record.absent)})
    return {"missing": {str(i): federation.names[i] for i in missing}}


def collect_notes(run: "RoundLoop") -> list[str]:
    """What the method has to say, where model or cohort are none that it was made for, and who was lost."""
    name, algorithm, records = run.config["algorithm"], run.algorithm, run.store.rounds()
    ids = sample_cohort(run.settings, len(run.everyone), run.record.round).to(run.everyone.device)
    said = list(algorithm.server.warnings(run.server, ids))
    personal = set(run.place.personal)
    if algorithm.personal not in (NoParameters(), AllParameters()) and personal == set(run.task.params):
        said.append("all of this model stays on the clients, so nothing is shared: this is training alone")
    if algorithm.personal == BatchNorms() and not personal:
        said.append("this model has no BatchNorm layers, so all of it is shared")
    some = len(ids) < len(run.everyone) or any(record.absent for record in records)
    if algorithm.full_participation and some:
        said.append("defined for rounds in which all clients take part, which was not so here")
    return [
        *algorithm.notes,
        *(f"{name}: {one}" for one in said),
        *_note_divergence(name, records, run.federation.names),
        *_note_lost_clients(name, run),
        *_note_settings(run, records),
    ]


def _note_lost_clients(name: str, run: "RoundLoop") -> list[str]:
    """Clients elsewhere that could not be reached, or whose uploads were refused, and why."""
    why: dict[str, dict[int, set[str]]] = {}
    for round_, client, reason in run.store.faults():
        why.setdefault(reason, {}).setdefault(round_, set()).add(run.federation.names[client])
    said = []
    for reason, rounds in why.items():
        names = sorted(set().union(*rounds.values()))
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        numbers = ", ".join(map(str, list(rounds)[:5])) + (", ..." if len(rounds) > 5 else "")
        plural = "s" * (len(rounds) > 1)
        said.append(f"{name}: round{plural} {numbers} without {listed}: {reason}")
    return said


def _note_divergence(name: str, records: Sequence[RoundRecord], names: Sequence[str]) -> list[str]:
    """Clients that diverged; `names` are the clients'."""
    diverged = [record for record in records if record.dropped]
    if not diverged:
        return []
    who = sorted({i for record in diverged for i in record.dropped})
    listed = ", ".join(names[i] for i in who[:5]) + (", ..." if len(who) > 5 else "")
    return [
        f"{name}: in {len(diverged)} of {len(records)} rounds training diverged on clients ({listed}): "
        "they kept the model they had and uploaded nothing; a lower learning rate would help"
    ]


def _note_settings(run: "RoundLoop", records: Sequence[RoundRecord]) -> list[str]:
    """What is the same for every method of a comparison, and so is said without a name."""
    said = []
    judged, n = len(run.judged), len(run.everyone)
    if judged < n:
        why = "" if run.settings.eval_clients else f", the default for more than {EVALUATE_ALL_UP_TO:,}"
        said.append(
            f"numbers are of {judged:,} of the {n:,} clients, drawn once for all methods (--eval-clients{why})"
        )
    if run.settings.drop_out and any(record.absent for record in records):
        said.append(
            "clients that were asked dropped out (--drop-out): their work of these rounds was lost; local, which is "
            "asked for nothing, loses none"
        )
    wanted = run.settings.bn_affine == "local" or run.settings.bn_buffers == "average"
    if wanted and not run.task.bn_statistics:
        said.append("this model has no BatchNorm layers: --bn-affine and --bn-buffers change nothing")
    return said
