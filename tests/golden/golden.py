"""Record and compare the results of many small runs, to full precision.

A change that is meant to move code, not numbers, leaves every recorded number as it was, bit for bit:

    python tests/golden/golden.py check                # compare with the recorded numbers
    python tests/golden/golden.py check --only ditto   # only the runs whose names contain "ditto"
    python tests/golden/golden.py record               # record anew, after a change that is meant to move numbers

The numbers depend on the processor and on the version of PyTorch, so the file says which ones they come from.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # the order of a sum depends on the number of threads
os.environ["FEDATTUNE_MEASURE"] = "off"  # a measured choice may differ between two processes
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from torch import nn

HERE = Path(__file__).parent
FILE = HERE / "golden.json"
sys.path.insert(0, str(HERE.parent))

import fedattune
from fedattune import Federation, Result
from fedattune.algorithms import ALGORITHMS
from fedattune.runs.metrics import score_clients
from federations import make_federation

RUN: dict[str, Any] = {"rounds": 3, "cohort": 0.5, "steps": 3, "batch_size": 8, "lr": 0.1}
REMOTE = ("fedavg", "fedmcsa", "pfedla", "ditto", "scaffold", "fedfomo", "fedrod", "pfedme", "igfl", "local")
"""Methods that also run on Ray and on Flower: one of every kind."""

VARIANTS: dict[str, dict[str, Any]] = {
    "everyone-trains": {"train": "all"},
    "drop-outs": {"drop_out": 0.4},
    "newcomers": {"held_out": 2, "join_rounds": 2},
    "on-disk": {"client_state": "disk"},
    "float64": {"dtype": "float64"},
    "epochs": {"steps": None, "epochs": 2},
    "some-evaluated": {"eval_clients": 3, "eval_every": 2},
    "bfloat16": {"mixed_precision": "bfloat16"},
}
VARIED = ("fedavg_ft", "fedmcsa", "pfedme", "pfedla", "heurpfedla", "ditto", "scaffold", "fedfomo", "l2gd", "fedcp")


def make_normed() -> nn.Module:
    """Make a small network with convolution and BatchNorm layers for images of 8 by 8."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(36, 10),
    )  # fmt: skip


def make_data() -> dict[str, tuple[Federation, Any, dict[str, Any]]]:
    """Make the three kinds of data, each with its model and the model's options."""
    images = fedattune.load_federation("digits", partition="dirichlet", clients=6)
    table = fedattune.load_federation(
        data=str(HERE.parents[1] / "examples" / "hospitals.csv"),
        client_column="hospital",
        target="outcome",
        scaling="client",
    )
    return {
        "tensors": (make_federation([14, 20, 31, 41, 50, 60]), "dnn", {"hidden": 6}),
        "images": (images, make_normed(), {}),
        "table": (table, "mlr", {}),
    }


def runs() -> Iterator[tuple[str, Callable[[], Result]]]:
    """Yield the name of every run, and the function that trains it."""
    data = make_data()

    def fit(kind: str, method: str, **settings: Any) -> Result:
        federation, model, options = data[kind]
        return fedattune.fit(federation, method, model, model_options=options, **(RUN | settings))

    for kind in data:
        for engine in ("sequential", "vectorized"):
            for method in ALGORITHMS:
                yield f"{kind}/{engine}/{method}", lambda k=kind, e=engine, m=method: fit(k, m, engine=e)
    for variant, settings in VARIANTS.items():
        for method in VARIED:
            yield f"{variant}/{method}", lambda s=settings, m=method: fit("tensors", m, **s)
    for buffers in ("local", "average"):
        for affine in ("local", "average"):
            settings = {"bn_buffers": buffers, "bn_affine": affine}
            for method in ("fedavg", "fedmcsa", "pfedme"):
                yield f"bn-{buffers}-{affine}/{method}", lambda s=settings, m=method: fit("images", m, **s)
    for method in ALGORITHMS:
        yield f"resumed/{method}", lambda m=method: resume(fit, m)
    for method in REMOTE:
        yield f"ray/{method}", lambda m=method: fit("tensors", m, engine="ray", ray_actors=2)
    for method in REMOTE:
        yield f"flower/{method}", lambda m=method: deploy(data["tensors"][0], m)


def resume(fit: Callable[..., Result], method: str) -> Result:
    """Stop a run after its second round of three, and go on from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        done: list[int] = []
        out = Path(folder) / "run"
        fit("tensors", method, out=out, callbacks=[fedattune.OnRound(lambda p: done.append(p.round) or len(done) == 2)])
        result = fit("tensors", method, out=out, resume=True)
        return describe(result)  # type: ignore[return-value]  # before the folder goes


def deploy(federation: Federation, method: str) -> Result:
    """Run a method over the nodes of a Flower grid in this process."""
    from flower.runs import run_deployed

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            (result,) = run_deployed(federation, Path(folder), algorithms=method, cohort=3, rounds=4, steps=3)
        return describe(result)  # type: ignore[return-value]


def outcome(train: Callable[[], Result]) -> dict[str, Any]:
    """Train a run and return its numbers, or the kind of error with which FedAttune refuses it."""
    try:
        return describe(train())
    except fedattune.FedAttuneError as error:
        return {"refused": type(error).__name__}


def describe(result: Result) -> dict[str, Any]:
    """Return the numbers of a run: the means as they are, and digests of everything behind them."""
    if isinstance(result, dict):
        return result
    points = ("received", "trained", "global", "validation")
    history = [{point: entry.get(point) for point in points} for entry in result.history]
    last = result.history[-1][result.evaluation_point]
    scores = hashlib.sha256()
    for part in ("test", "validation"):
        for round_, point, values in result.store.scores(part):
            scores.update(f"{part} {round_} {point} ".encode() + values.tobytes())
    mixing = hashlib.sha256()
    for round_, components in result.mixing.items():
        for component, matrix in components.items():
            mixing.update(f"{round_} {component} ".encode() + matrix.tobytes())
    models = hashlib.sha256()
    for stack in (result.models, result.buffers):
        for name in sorted(stack):
            models.update(name.encode() + stack[name].contiguous().cpu().numpy().tobytes())
    return {
        "accuracy": last["acc_uniform"],
        "loss": last["loss_uniform"],
        "bytes": [result.bytes_up, result.bytes_down],
        "traffic": digest(result.store.traffic()),
        "steps": result.local_steps,
        "history": digest(history),
        "scores": scores.hexdigest()[:16],
        "mixing": mixing.hexdigest()[:16],
        "models": models.hexdigest()[:16],
        "clients": digest(list_last(result)),
        "newcomers": digest([[c.id, c.received, c.trained, c.local] for c in result.newcomers]),
    }


def list_last(result: Result) -> list[list[Any]]:
    """List the clients with their test scores at the last evaluation, at both points."""
    last = {
        (number, point): float(score_clients(*scores, deviation=result.target_deviation))
        for point in ("received", "trained")
        for number, scores in zip(
            result.eval_ids, result.store.last_scores("test", point, result.eval_ids).T, strict=True
        )
        if scores[0] > 0
    }
    return [
        [c.id, c.n_train, c.n_test, last.get((number, "received")), last.get((number, "trained"))]
        for number, c in zip(result.eval_ids, result.clients, strict=True)
    ]


def digest(value: Any) -> str:
    """Return the digest of a JSON value; floats keep all their digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return the name of the processor and the version of PyTorch."""
    names = Path("/proc/cpuinfo")
    text = names.read_text() if names.exists() else ""
    name = next((line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line), "")
    return {"processor": name or platform.processor(), "torch": torch.__version__}


def differences(only: str = "", report: Callable[[str], None] = lambda _: None) -> list[str]:
    """Train the runs whose names contain `only`; return a sentence for each that is not as recorded."""
    recorded = json.loads(FILE.read_text())["runs"]
    found = []
    for name, train in runs():
        if only not in name:
            continue
        now, before = outcome(train), recorded.get(name)
        if now != before:
            found.append(f"{name}: recorded {before}, got {now}")
            report(found[-1])
    return found


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("--only", default="", help="only the runs whose names contain this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.command == "check":
        if (before := json.loads(FILE.read_text())["machine"]) != machine():
            print(f"recorded on {before}, this is {machine()}: expect differences in the last digits")
        found = differences(options.only, lambda sentence: print(sentence, flush=True))
        print(f"{len(found)} differences")
        return bool(found)
    old = json.loads(FILE.read_text())["runs"] if options.only and FILE.exists() else {}
    new = {name: outcome(train) for name, train in runs() if options.only in name}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in (old | new).items())
    FILE.write_text(f'{{"machine": {json.dumps(machine())},\n"runs": {{\n{lines}\n}}}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
