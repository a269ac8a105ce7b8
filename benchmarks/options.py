"""Read the options that several commands share, and end a command."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from fedattune.core.errors import ConfigError
from fedattune.experiments.output import check_output_files

T = TypeVar("T")


def expect(what: str, read: Callable[[str], T], is_valid: Callable[[T], bool]) -> Callable[[str], T]:
    """Make a reader of an option's values, which tells what it expected if a value is another one."""

    def read_value(text: str) -> T:
        try:
            if is_valid(value := read(text)):
                return value
        except (ValueError, RuntimeError):  # of PyTorch for a device that it does not know
            pass
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")

    return read_value


read_count = expect("a whole number of at least 1", int, lambda n: n >= 1)
read_seeds = expect(
    "whole numbers of at least 0 with commas between",
    lambda text: [int(part) for part in text.split(",")],
    lambda seeds: min(seeds) >= 0,
)
read_epsilons = expect(
    "numbers above 0 with commas between, such as inf,10",
    lambda text: [float(part) for part in text.split(",")],
    lambda epsilons: all(epsilon > 0 for epsilon in epsilons),
)
read_device = expect(
    "cpu, or cuda where PyTorch finds a GPU",
    torch.device,
    lambda device: device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()),
)


def read_output_file(text: str) -> Path:
    """Read the path of a file that can be written, so that nothing is measured in vain."""
    path = Path(text)
    try:
        check_output_files({"file": path}, {})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process; say nothing if the reader of a pipe has left, as in `... --list | head -1`."""
    code: int | str | None
    try:
        try:
            code = main()
        except SystemExit as leaving:  # --help
            code = leaving.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    raise SystemExit(code)
