"""Check an installation: versions, machine, folders, and a tiny training run."""

import contextlib
import importlib.metadata
import io
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from .._version import __version__
from ..core.checks import GIB, Check, Finding, broken, check_free_space, find_write_error, note, ok, run_checks
from ..core.errors import summarize_error

NEEDED_PACKAGES = (
    "torch", "numpy", "pydantic", "PyYAML", "rich", "safetensors", "scikit-learn", "scipy", "pyarrow", "pillow",
    "huggingface_hub", "filelock", "psutil", "jinja2", "shtab",
)  # fmt: skip
EXTRAS = {
    "plot": ("fedattune plot", "matplotlib"),
    "pandas": ("data frames in Python", "pandas"),
    "export": ("models as ONNX files", "onnx", "onnxruntime", "onnxscript"),
    "tensorboard": ("--tensorboard", "tensorboard"),
    "mlflow": ("--mlflow", "mlflow-skinny", "sqlalchemy", "alembic"),
    "wandb": ("--wandb", "wandb"),
    "ray": ("--engine ray, on a cluster", "ray"),
    "flower": ("fedattune deploy", "flwr", "cryptography", "prometheus-client", "pycryptodome", "tomli-w"),
    "hf": ("--model hf, pretrained networks", "transformers", "peft"),
    "privacy": ("differential privacy", "dp-accounting"),
}
"""Optional extra of the package -> its purpose, and the packages that it installs."""
MIN_PYTHON = (3, 11)


def examine(*, quick: bool = False) -> list[Finding]:
    """Examine the installation."""
    return run_checks([check for check in CHECKS if not (quick and check.name == "training")])


def _check_python() -> Iterator[Finding]:
    version = platform.python_version()
    text = f"FedAttune {__version__}, Python {version}, {platform.platform()}"
    if sys.version_info[:2] < MIN_PYTHON:
        yield broken("version", text, "install Python 3.11 or newer, and fedattune into it")
    else:
        facts = {"version": version, "platform": platform.platform(), "fedattune": __version__}
        yield ok("version", text, **facts)


def _find_versions(packages: Iterable[str]) -> tuple[dict[str, str | None], list[str]]:
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions, [name for name, version in versions.items() if version is None]


def _check_packages() -> Iterator[Finding]:
    versions, missing = _find_versions(NEEDED_PACKAGES)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        yield Finding("packages", "broken", f"missing: {', '.join(missing)}", advice, versions)
    else:
        yield ok("packages", ", ".join(f"{name} {version}" for name, version in versions.items()), **versions)


def _check_torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # also a missing library of the system
        advice = "pip install torch, as https://pytorch.org/get-started/locally says for this machine"
        yield broken("PyTorch", f"it cannot be imported ({summarize_error(error)})", advice)
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU only"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ["cpu", *(f"cuda:{i} ({name})" for i, name in enumerate(gpus))]
    text = f"PyTorch {torch.__version__}, {build}; devices: {', '.join(devices)}"
    threads = torch.get_num_threads()
    found = ok(
        "PyTorch", text, torch=torch.__version__, cuda_build=torch.version.cuda, devices=devices, threads=threads
    )
    if torch.version.cuda and not gpus:
        advice = "no GPU is found: check the driver by nvidia-smi; training runs on the CPU meanwhile"
        found = replace(found, state="note", advice=advice)
    for i in range(len(gpus)):
        try:
            torch.ones(8, device=f"cuda:{i}").sum().item()
        except RuntimeError as error:
            advice = f"cuda:{i} fails ({summarize_error(error)}); train with --device cpu"
            found = replace(found, state="broken", advice=advice)
    yield found
    yield ok("threads", f"{threads} in PyTorch; OMP_NUM_THREADS sets another number")


def _check_extras() -> Iterator[Finding]:
    for extra, (purpose, *packages) in EXTRAS.items():
        versions, missing = _find_versions(packages)
        if missing:
            advice = f"pip install 'fedattune[{extra}]'"
            yield Finding(f"extra {extra}", "note", f"{purpose}: not installed", advice, versions)
        else:
            found = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield ok(f"extra {extra}", f"{purpose}: {found}", **versions)


def _can_import_torch() -> bool:
    try:
        import torch  # noqa: F401
    except Exception:
        return False
    return True


def _check_machine() -> Iterator[Finding]:
    cores, memory = os.cpu_count() or 1, None
    if _can_import_torch():
        from ..core.hardware import count_available_cores, count_free_memory_bytes

        cores, memory = count_available_cores(), count_free_memory_bytes()
    yield ok("cores", f"{cores} available of {os.cpu_count()}", cores=cores)
    memory_text = "unknown" if memory is None else f"{memory / GIB:.1f} GiB available"
    yield ok("memory", memory_text, available_bytes=memory)
    advice = "free some space, or give --out on another disk"
    yield check_free_space("disk", Path.cwd(), " in the current folder", "note", advice)


def _check_folders() -> Iterator[Finding]:
    home = Path(os.environ.get("FEDATTUNE_HOME") or Path.home() / ".cache" / "fedattune").expanduser()
    for name, folder, advice in (
        ("cache folder", home, "set FEDATTUNE_HOME to a folder that can be written to"),
        ("run folder", Path.cwd() / "runs", "change to a folder that can be written to, or give --out"),
    ):
        if reason := find_write_error(folder):
            yield broken(name, f"{folder}: cannot be written to: {reason}", advice)
        else:
            yield ok(name, f"{folder}: can be written to", folder=str(folder))
    saved = sorted(path.stem for path in (home / "partitions").glob("*.json"))
    yield ok("partitions", f"{len(saved)} saved" + (f": {', '.join(saved)}" if saved else ""))
    path = Path(os.environ.get("FEDATTUNE_DATA", "")).expanduser()
    if not os.environ.get("FEDATTUNE_DATA"):
        text = "not set, so image sets come from the Hugging Face hub; FEDATTUNE_DATA or --data-dir names a folder"
        yield ok("data folder", text)
    elif not path.is_dir():
        yield broken("data folder", f"{path}: there is no such folder", "correct FEDATTUNE_DATA, or unset it")
    else:
        names = sorted(one.name for one in path.iterdir())
        some = f"{', '.join(names[:10])}{' and more' if len(names) > 10 else ''}" if names else "empty"
        yield ok("data folder", f"{path}: {some}", folder=str(path), names=names)


def _describe_choices() -> Iterator[Finding]:
    """Tell which calls were measured as the fastest on this machine; the facts have the times."""
    if not _can_import_torch():
        yield note("fastest calls", "unknown without PyTorch", "")
        return
    from ..core.measured import choices_path, describe_machine, find_choices, is_allowed

    if not is_allowed():
        yield ok("fastest calls", "not measured: FEDATTUNE_MEASURE is off")
        return
    choices = find_choices()
    counts = Counter((what.partition(" ")[0], choice.name) for what, choice in choices.items() if choice.name)
    found = ", ".join(f"{what} by {name} ({n} sizes)" for (what, name), n in sorted(counts.items()))
    if busy := sum(choice.is_open for choice in choices.values()):
        found += f"; {busy} measured beside other busy processes, so the next run measures them again"
    yield ok(
        "fastest calls",
        found or "none measured yet; a run measures what it needs",
        machine=describe_machine(),
        file=str(choices_path() or ""),
        choices={what: choice._asdict() for what, choice in choices.items()},
    )


def _describe_precision() -> Iterator[Finding]:
    """Tell whether the processor has bfloat16 arithmetic, which no run takes by itself."""
    if not _can_import_torch():
        return
    from ..core.hardware import has_cpu_bfloat16

    yield ok(
        "bfloat16",
        "this processor has it: --mixed-precision bfloat16 trains convolutional networks faster on large batches; "
        "results change by rounding to eight bits"
        if has_cpu_bfloat16()
        else "this processor has no bfloat16 arithmetic",
    )


def _train_tiny_run() -> Iterator[Finding]:
    """Train a method for two rounds on made-up data in a temporary folder, and read the run again."""
    begun = time.monotonic()
    import torch

    from ..data import federation_from
    from ..runs.result import Result
    from ..training.fit import fit

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(20, 4, generator=generator) for _ in range(3)]
    clients = [(x, (x[:, 0] > 0).long()) for x in inputs]
    with tempfile.TemporaryDirectory(prefix="fedattune-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()):
            fit(federation_from(clients), "fedmcsa", rounds=2, steps=2, lr=0.1, out=Path(folder) / "run")
        rounds = Result.load(Path(folder) / "run").rounds
    seconds = time.monotonic() - begun
    yield ok("training", f"a run of {rounds} rounds works ({seconds:.1f} s)", seconds=seconds)


REINSTALL = "reinstall fedattune in a new environment"
CHECKS = (
    Check("version", _check_python, REINSTALL),
    Check("packages", _check_packages, REINSTALL),
    Check("PyTorch", _check_torch, REINSTALL),
    Check("extras", _check_extras, REINSTALL),
    Check("machine", _check_machine, REINSTALL),
    Check("folders", _check_folders, "set FEDATTUNE_HOME and FEDATTUNE_DATA to folders of your own"),
    Check(
        "training", _train_tiny_run, "set FEDATTUNE_DEBUG=1 and run fedattune compare --rounds 2 to see where it fails"
    ),
    Check("fastest calls", _describe_choices, REINSTALL),
    Check("bfloat16", _describe_precision, REINSTALL),
)
"""The checks of `fedattune doctor`. The training run measures some of the choices that a later check describes."""
