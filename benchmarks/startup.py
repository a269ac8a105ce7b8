"""W9: measure how long a user waits before training, in fresh processes.

`python -m benchmarks W9`. The floors of help and import are the bare interpreter and PyTorch's own import. Decoding
cold (no cache) and warm (mapped from the cache) is compared with a hand-written loop over Pillow that keeps nothing.
"""

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from .measure import Case, Figures, Setting, Skip, Target

SEPARATE = 5
"""Fresh processes of each kind."""

BARE, TORCH = "pass", "import torch"
COMMANDS = {
    "python": (BARE,),
    "import fedattune": ("import fedattune",),
    "--help": ("import sys; from fedattune.cli import main; sys.exit(main(['--help']))",),
    "import torch": (TORCH,),
    "list": ("import sys; from fedattune.cli import main; sys.exit(main(['list']))",),
}


def _seconds(code: str, more: Mapping[str, str] | None = None) -> float:
    """Return the seconds of a fresh interpreter that runs this code."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **(more or {})},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def commands(setting: Setting) -> Figures:
    """Measure help, import and list."""
    repeats = setting.repeats or (1 if setting.quick else SEPARATE)
    names = ("python", "--help") if setting.quick else tuple(COMMANDS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats + (not setting.quick)):  # the first one reads files from the disk
        for name in names:
            seconds[name].append(_seconds(COMMANDS[name][0]))
    seconds = {name: took[-repeats:] for name, took in seconds.items()}
    targets = (Target("import fedattune", "import torch", 0.1), Target("--help", "import torch", 0.1))
    return Figures("W9-commands", CASES[0].about, seconds, "python", targets, paired=True)


FIRST = """
import sys
from fedattune.cli import main
sys.exit(main(["run", "--data", "digits", "--rounds", "1", "--out", sys.argv[-1] + "/o", "--quiet"]))
"""


def first_round(setting: Setting) -> Figures:
    """Measure from the command line to the end of the first round."""
    repeats = setting.repeats or (1 if setting.quick else SEPARATE)
    seconds: dict[str, list[float]] = {"import torch": [], "first round": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            seconds["import torch"].append(_seconds(TORCH))
            seconds["first round"].append(_seconds(FIRST.replace("sys.argv[-1]", repr(folder))))
    return Figures("W9-first-round", CASES[1].about, seconds, "import torch", paired=True)


def decoding(setting: Setting) -> Figures:
    """Measure one data set: decoded by hand, by FedAttune without its cache, and from the cache."""
    from fedattune.data import load_data

    name = "mnist"
    given = os.environ.get("FEDATTUNE_DATA")
    if setting.quick:
        folder = Path(tempfile.mkdtemp())
        _write_small(folder / name)
    elif given and (Path(given) / name).is_dir():
        folder = Path(given)
    else:
        raise Skip(f"set FEDATTUNE_DATA to a folder that holds {name}/*.parquet")
    files = sorted((folder / name).glob("*.parquet"))
    seconds: dict[str, list[float]] = {"floor": [], "cold": [], "warm": []}
    before = os.environ.get("FEDATTUNE_CACHE")
    try:
        for _ in range(setting.repeats or (1 if setting.quick else 3)):
            with tempfile.TemporaryDirectory() as cache:
                os.environ["FEDATTUNE_CACHE"] = cache
                for way, took in seconds.items():
                    start = time.perf_counter()
                    if way == "floor":
                        _by_hand(files)
                    else:
                        load_data(name, data_dir=folder).fingerprint  # noqa: B018 (its computation is measured)
                    took.append(time.perf_counter() - start)
    finally:
        os.environ.pop("FEDATTUNE_CACHE")
        if before is not None:
            os.environ["FEDATTUNE_CACHE"] = before
    targets = (Target("cold", "floor", 1.2), Target("warm", "floor", 0.1))
    return Figures("W9-decoding", CASES[2].about, seconds, "floor", targets, paired=True)


def _by_hand(files: list[Path]) -> object:
    import numpy as np
    from PIL import Image
    from pyarrow import parquet

    images = []
    for file in files:
        for cell in parquet.read_table(file, columns=["image"]).column("image").to_pylist():
            images.append(np.asarray(Image.open(io.BytesIO(cell["bytes"]))))  # noqa: PERF401 (plain code)
    return np.stack(images)


def _write_small(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    folder.mkdir(parents=True)
    cells = []
    for k in range(20):
        out = io.BytesIO()
        Image.fromarray(np.full((28, 28), k, np.uint8)).save(out, format="PNG")
        cells.append({"bytes": out.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(cells, kind), "label": [k % 10 for k in range(20)]})
    parquet.write_table(table, folder / "train-0.parquet")


CASES = (
    Case("W9-commands", "help, import and list in fresh processes", commands),
    Case("W9-first-round", "run --data digits --rounds 1 in a fresh process", first_round),
    Case("W9-decoding", "MNIST from PNGs in Parquet: by hand, without and with the cache", decoding),
)
