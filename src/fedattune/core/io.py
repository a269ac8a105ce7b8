"""Read and write files: text, JSON, YAML and tensors. A crash leaves the old file or the new one, never half a file."""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from yaml.constructor import ConstructorError

from .errors import ConfigError, RunError


def find_cache_folder() -> Path | None:
    """Return the folder of all caches; None if FEDATTUNE_CACHE is `off`, or if the user has no home folder.

    FEDATTUNE_CACHE names the folder. Else it is `cache` in FEDATTUNE_HOME, else `fedattune/arrays` in the user's
    folder for caches (XDG_CACHE_HOME, or the system's).
    """
    folder, home = os.environ.get("FEDATTUNE_CACHE"), os.environ.get("FEDATTUNE_HOME")
    try:
        if folder:
            return None if folder.lower() == "off" else Path(folder).expanduser()
        return Path(home).expanduser() / "cache" if home else _find_user_caches() / "fedattune" / "arrays"
    except RuntimeError:  # a user without a home
        return None


def _find_user_caches() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME")
    if folder and Path(folder).is_absolute():  # the specification says to ignore others
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`; it replaces `path` if the block ends without an error.

    Behind a link, the target is replaced. A device or a pipe is yielded itself.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))
    new = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield new
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing. Print the text if `path` is standard output, such as /dev/stdout."""
    if is_stdout(path):
        print(text, flush=True)  # a second open would overwrite earlier output
        return
    with replace_atomically(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every system


def is_stdout(path: Path) -> bool:
    """Tell whether a path is this process's standard output, such as /dev/stdout, also where a file takes it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


MAX_YAML_BYTES, MAX_JSON_BYTES = 1 << 20, 1 << 30
"""Bytes of a file that is read as YAML or JSON. A megabyte of YAML takes many seconds; an experiment has a kilobyte."""

MAX_YAML_SIZE = 2 * MAX_YAML_BYTES
"""Characters and values of a YAML file, counted at each place where an alias repeats them."""


class _CarefulLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys, of which YAML keeps the last one silently, and alias bombs.

    PyYAML, ruamel.yaml and strictyaml have no limit on aliases; strictyaml refuses all of them.
    """

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _measure_node(node, {}) > MAX_YAML_SIZE:
            raise ConstructorError(
                None, None, f"its aliases stand for more than {MAX_YAML_SIZE >> 20} MiB", node.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def _measure_node(node: yaml.Node, known: dict[int, int]) -> int:
    """Measure a node and all below it, once for each alias; an alias of a node that it is part of has no end."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if (size := known.get(id(node))) is None:
        known[id(node)] = MAX_YAML_SIZE + 1  # met again below itself
        below = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        size = known[id(node)] = 1 + sum(_measure_node(one, known) for one in below)
    return size


def _read_limited(path: Path, n_bytes: int) -> str:
    with path.open("rb") as file:
        content = file.read(n_bytes + 1)
    if len(content) > n_bytes:
        raise ValueError(f"it has more than {n_bytes >> 20:,} MiB")
    return content.decode("utf-8")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; keys become text."""
    try:
        content = yaml.load(_read_limited(path, MAX_YAML_BYTES), _CarefulLoader)  # noqa: S506 (a safe loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # impossible dates and numbers, deep nesting
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else f": {error}"
        raise ConfigError(f"{path} is not valid YAML{where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys with values such as 'rounds: 50', got a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""A number such as 1e-3, which YAML 1.1, and so PyYAML, takes for text unless it has a point and a sign."""


def read_scalar(text: str) -> Any:
    """Return the YAML value of `text`, or the text itself if it is not YAML; 1e-3 is a number."""
    if EXPONENT.fullmatch(text.strip()) and math.isfinite(number := float(text)):
        return number
    try:
        return yaml.load(text, _CarefulLoader)  # noqa: S506 (a safe loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


RESERVED_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
"""Names of devices, which no file can have on Windows, whatever its suffix."""
MAX_NAME_BYTES = 100
"""Bytes of a client's name in a file name; systems allow 255 for the whole name."""


def clean_file_name(client: str) -> str:
    """Replace all characters of a client's name that a file name of any system cannot hold; keep 100 bytes."""
    name = re.sub(r"[^\w.-]", "_", client).encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    name = re.sub(r"\.+$", "_", name)
    return f"_{name}" if RESERVED_NAMES.match(name) else name


def flatten_tree(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their paths, joined by slashes."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}/{key}" if path else key
        flat |= flatten_tree(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to main memory, each into memory of its own, as `save_tensors` needs them."""
    # Rows of an expanded tensor share memory, which the file format cannot express.
    return {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: Mapping[str, str]) -> None:
    """Write a safetensors file, atomically and durably; no two tensors may share memory (see `copy_tensors`)."""
    if path.exists() and not path.is_file():
        raise RunError(f"cannot write {path}: tensors go to a file, and this is none")
    with replace_atomically(path) as new:
        try:
            save_file(tensors, new, dict(meta))
        except SafetensorError as error:  # the library's name for errors of the disk
            raise RunError(
                f"cannot write {path}: {error}; free some space, or make the folder writable; what was written before "
                "is intact"
            ) from error


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the text of a file of `save_tensors`.

    The tensors are copies: Windows neither replaces nor removes a file that is mapped into memory.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {k: _copy_bytes(file.get_tensor(k)) for k in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def _copy_bytes(tensor: Tensor) -> Tensor:
    """Copy a tensor bit by bit: `clone` repairs damaged truth values, which a checksum should find."""
    return tensor.reshape(-1).view(torch.uint8).clone().view(tensor.dtype).reshape(tensor.shape)


def unfinished_files(folder: Path) -> list[Path]:
    """List the temporary files that killed processes left in a folder (see `replace_atomically`)."""
    return sorted(folder.glob(".*.tmp*"))


def write_json(path: Path, content: Any) -> None:
    """Write a whole JSON file or nothing."""
    write_text(path, format_json(content))


def format_json(content: Any) -> str:
    """Return the text of a JSON file; numbers that JSON cannot write become null."""
    return json.dumps(replace_nonfinite(content), indent=1, allow_nan=False) + "\n"


def replace_nonfinite(value: Any) -> Any:
    """Copy a nest of mappings and lists, with None for numbers that JSON cannot write."""
    if isinstance(value, Mapping):
        return {k: replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Read a JSON file; NaN and infinite numbers, which `write_json` never writes, are refused."""
    try:
        return parse_json(_read_limited(path, MAX_JSON_BYTES))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"cannot read {path}: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON without NaN and infinite numbers; raise a ValueError for anything else."""
    try:
        return json.loads(text, parse_constant=_refuse_number, parse_float=_parse_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse_number(text)
    return value


def natural_key(name: str) -> list[str | int]:
    """Return a sort key that puts layer 4 before layer 11."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
