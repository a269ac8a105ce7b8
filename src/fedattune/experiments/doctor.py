"""Check an installation: versions, machine, folders, and a tiny training run."""

import contextlib
import importlib.metadata
import io
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .._version import __version__
from ..core.errors import summarize_error

State = Literal["ok", "note", "broken"]

NEEDED_PACKAGES = (
    "torch", "numpy", "pydantic", "PyYAML", "rich", "safetensors", "scikit-learn", "scipy", "pyarrow", "pillow",
    "huggingface_hub", "filelock", "psutil", "jinja2", "shtab",
)  # fmt: skip
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "plot": ("matplotlib",),
    "pandas": ("pandas",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "tensorboard": ("tensorboard",),
    "ray": ("ray",),
    "flower": ("flwr", "cryptography", "prometheus-client", "pycryptodome", "tomli-w"),
    "hf": ("transformers", "peft"),
    "privacy": ("dp-accounting",),
}
"""Optional extra of the package -> the packages that it installs."""

EXTRA_PURPOSES = {
    "plot": "fedattune plot",
    "pandas": "data frames in Python",
    "export": "models as ONNX files",
    "tensorboard": "--tensorboard",
    "ray": "--engine ray, on a cluster",
    "flower": "fedattune deploy",
    "hf": "--model hf, pretrained networks",
    "privacy": "differential privacy",
}

MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 1 << 30
"""Free disk space below which a run may fail."""


@dataclass(frozen=True)
class Finding:
    """One line of the check.

    Attributes:
        name: what was checked.
        state: `ok`, `note` for something that may be wanted, or `broken` for something that training needs.
        value: what was found, as text.
        advice: what to do, if anything.
        facts: the same for programs.

    """

    name: str
    state: State
    value: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def examine(*, quick: bool = False) -> list[Finding]:
    """Examine the installation.

    Args:
        quick: leave out the training run.

    """
    checks: list[Callable[[], Finding | Sequence[Finding]]] = [
        _check_python,
        _check_packages,
        _check_torch,
        _check_extras,
        _check_machine,
        _check_folders,
    ]
    if not quick:
        checks.append(_train_tiny_run)
    checks += [_describe_choices, _describe_precision]  # the run measures some choices
    findings: list[Finding] = []
    for check in checks:
        try:
            found = check()
        except Exception as error:  # a check never hides the others
            name = check.__name__.rpartition("_")[2]
            found = Finding(
                name, "broken", summarize_error(error), "reinstall fedattune in a new environment"
            )
        findings += [found] if isinstance(found, Finding) else found
    return findings


def _check_python() -> Finding:
    version = platform.python_version()
    is_old = sys.version_info[:2] < MIN_PYTHON
    facts = {"version": version, "platform": platform.platform(), "fedattune": __version__}
    advice = "install Python 3.11 or newer, and fedattune into it" if is_old else ""
    text = f"FedAttune {__version__}, Python {version}, {platform.platform()}"
    return Finding("version", "broken" if is_old else "ok", text, advice, facts)


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_packages() -> Finding:
    """Check the packages that fedattune always needs."""
    versions = {name: _find_version(name) for name in NEEDED_PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Finding("packages", "broken", f"missing: {', '.join(missing)}", advice, versions)
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding("packages", "ok", text, facts=versions)


def _check_torch() -> list[Finding]:
    """Check PyTorch, its devices and its threads."""
    try:
        import torch
    except Exception as error:  # also a missing library of the system
        advice = "pip install torch, as https://pytorch.org/get-started/locally says for this machine"
        return [Finding("PyTorch", "broken", f"it cannot be imported ({summarize_error(error)})", advice)]
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU only"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ["cpu", *(f"cuda:{i} ({name})" for i, name in enumerate(gpus))]
    state: State = "ok"
    advice = ""
    if torch.version.cuda and not gpus:
        state = "note"
        advice = "no GPU is found: check the driver by nvidia-smi; training runs on the CPU meanwhile"
    for i in range(len(gpus)):
        try:
            torch.ones(8, device=f"cuda:{i}").sum().item()
        except RuntimeError as error:
            state, advice = "broken", f"cuda:{i} fails ({summarize_error(error)}); train with --device cpu"
    threads = torch.get_num_threads()
    facts = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "devices": devices,
        "threads": threads,
    }
    text = f"PyTorch {torch.__version__}, {build}; devices: {', '.join(devices)}"
    note = f"{threads} in PyTorch; OMP_NUM_THREADS sets another number"
    return [Finding("PyTorch", state, text, advice, facts), Finding("threads", "ok", note)]


def _check_extras() -> list[Finding]:
    """Find the optional extras, and how to install the missing ones."""
    findings = []
    for extra, packages in EXTRAS.items():
        versions = {name: _find_version(name) for name in packages}
        missing = [name for name, version in versions.items() if version is None]
        what = f"{EXTRA_PURPOSES[extra]}: "
        if missing:
            text, advice = f"{what}not installed", f"pip install 'fedattune[{extra}]'"
            findings.append(Finding(f"extra {extra}", "note", text, advice, versions))
        else:
            text = what + ", ".join(f"{name} {version}" for name, version in versions.items())
            findings.append(Finding(f"extra {extra}", "ok", text, facts=versions))
    return findings


def _can_import_torch() -> bool:
    try:
        import torch  # noqa: F401
    except Exception:
        return False
    return True


def _check_machine() -> list[Finding]:
    """Count cores and memory, and the free space for runs in the current folder."""
    cores, memory = os.cpu_count() or 1, None
    if _can_import_torch():
        from ..core.hardware import count_available_cores, count_free_memory_bytes

        cores, memory = count_available_cores(), count_free_memory_bytes()
    free = shutil.disk_usage(Path.cwd()).free
    is_full = free < MIN_FREE_BYTES
    gib = 1 << 30
    memory_text = "unknown" if memory is None else f"{memory / gib:.1f} GiB available"
    return [
        Finding("cores", "ok", f"{cores} available of {os.cpu_count()}", facts={"cores": cores}),
        Finding("memory", "ok", memory_text, facts={"available_bytes": memory}),
        Finding(
            "disk",
            "note" if is_full else "ok",
            f"{free / gib:.1f} GiB free in the current folder",
            "free some space, or give --out on another disk" if is_full else "",
            {"free_bytes": free},
        ),
    ]


def _check_folders() -> list[Finding]:
    """Check the folder of caches and saved partitions, and the current folder for run folders."""
    home = Path(os.environ.get("FEDATTUNE_HOME") or Path.home() / ".cache" / "fedattune").expanduser()
    findings = []
    for name, folder, advice in (
        ("cache folder", home, "set FEDATTUNE_HOME to a folder that can be written to"),
        ("run folder", Path.cwd() / "runs", "change to a folder that can be written to, or give --out"),
    ):
        reason = _find_write_error(folder)
        state: State = "broken" if reason else "ok"
        text = f"{folder}: {'cannot be written to: ' + reason if reason else 'can be written to'}"
        findings.append(Finding(name, state, text, advice if reason else "", {"folder": str(folder)}))
    saved = sorted(path.stem for path in (home / "partitions").glob("*.json"))
    text = f"{len(saved)} saved" + (f": {', '.join(saved)}" if saved else "")
    return [*findings, Finding("partitions", "ok", text), _check_data_folder()]


def _find_write_error(folder: Path) -> str:
    """Try to write a file into a folder, or into the nearest parent that exists; return the reason of a failure."""
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"fedattune")
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _check_data_folder() -> Finding:
    """Check the folder with files of data sets, which FEDATTUNE_DATA names."""
    folder = os.environ.get("FEDATTUNE_DATA")
    if not folder:
        text = "not set, so image sets come from the Hugging Face hub; FEDATTUNE_DATA or --data-dir names a folder"
        return Finding("data folder", "ok", text)
    path = Path(folder).expanduser()
    if not path.is_dir():
        advice = "correct FEDATTUNE_DATA, or unset it"
        return Finding("data folder", "broken", f"{path}: there is no such folder", advice)
    names = sorted(one.name for one in path.iterdir())
    text = (
        f"{path}: {', '.join(names[:10])}{' and more' if len(names) > 10 else ''}"
        if names
        else f"{path}: empty"
    )
    return Finding("data folder", "ok", text, facts={"folder": str(path), "names": names})


def _describe_choices() -> Finding:
    """Tell which calls were measured as the fastest on this machine; the facts have the times."""
    if not _can_import_torch():
        return Finding("fastest calls", "note", "unknown without PyTorch")
    from ..core.measured import choices_path, describe_machine, find_choices, is_allowed

    if not is_allowed():
        return Finding("fastest calls", "ok", "not measured: FEDATTUNE_MEASURE is off")
    choices = find_choices()
    counts = Counter((what.partition(" ")[0], choice.name) for what, choice in choices.items() if choice.name)
    found = ", ".join(f"{what} by {name} ({n} sizes)" for (what, name), n in sorted(counts.items()))
    facts = {
        "machine": describe_machine(),
        "file": str(choices_path() or ""),
        "choices": {what: choice._asdict() for what, choice in choices.items()},
    }
    busy = sum(choice.is_open for choice in choices.values())
    if busy:
        found += f"; {busy} measured beside other busy processes, so the next run measures them again"
    return Finding(
        "fastest calls", "ok", found or "none measured yet; a run measures what it needs", facts=facts
    )


def _describe_precision() -> list[Finding]:
    """Tell whether the processor has bfloat16 arithmetic, which no run takes by itself."""
    if not _can_import_torch():
        return []
    from ..core.hardware import has_cpu_bfloat16

    if not has_cpu_bfloat16():
        return [Finding("bfloat16", "ok", "this processor has no bfloat16 arithmetic")]
    value = (
        "this processor has it: --mixed-precision bfloat16 trains convolutional networks faster on large batches; "
        "results change by rounding to eight bits"
    )
    return [Finding("bfloat16", "ok", value)]


def _train_tiny_run() -> Finding:
    """Train a method for two rounds on made-up data in a temporary folder, and read the run again."""
    try:
        from ..training.fit import fit  # noqa: F401

        begun = time.monotonic()
        rounds = _run_self_test()
    except Exception as error:
        advice = "set FEDATTUNE_DEBUG=1 and run fedattune compare --rounds 2 to see where it fails"
        return Finding("training", "broken", summarize_error(error), advice)
    seconds = time.monotonic() - begun
    return Finding(
        "training", "ok", f"a run of {rounds} rounds works ({seconds:.1f} s)", facts={"seconds": seconds}
    )


def _run_self_test() -> int:
    import torch

    from ..data import federation_from
    from ..runs.result import Result
    from ..training.fit import fit

    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(3):
        x = torch.randn(20, 4, generator=generator)
        clients.append((x, (x[:, 0] > 0).long()))
    with tempfile.TemporaryDirectory(prefix="fedattune-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()):
            fit(federation_from(clients), "fedmcsa", rounds=2, steps=2, lr=0.1, out=Path(folder) / "run")
        return Result.load(Path(folder) / "run").rounds
