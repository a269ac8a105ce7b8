"""The command `doctor`: check the installation, and say what to do.

This module imports nothing that needs PyTorch, because it must work where PyTorch does not.
"""

import json
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from .main import FAILED
from .options import DoctorOptions, parse_options

if TYPE_CHECKING:
    from ..core.checks import Finding

SIGNS = {"ok": "ok", "note": "--", "broken": "!!"}
"""State -> sign at the start of the line."""


def doctor(space: Namespace, problems: Sequence[str]) -> int:
    """Print what was found, and what to do; the exit code is 1 if something that training needs is broken."""
    from ..experiments.doctor import examine

    options = parse_options(DoctorOptions, space, problems)
    if options.json_file:  # imported here alone: the check needs PyTorch, which may be what is broken
        from ..experiments.output import check_output_files

        check_output_files({"--json": options.json_file}, {})
    findings = examine(quick=options.quick)
    broken = print_findings(findings)
    says = f"{len(broken)} broken: {', '.join(broken)}; the lines with -> say what to do."
    print(says if broken else "FedAttune works here.")
    if options.json_file:
        content = {"works": not broken, "findings": [asdict(one) for one in findings]}
        options.json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return FAILED if broken else 0


def print_findings(findings: "Sequence[Finding]") -> list[str]:
    """Print findings and their advice, wrapped at the width of the terminal; return the names of the broken ones."""
    width = max(shutil.get_terminal_size().columns, 40)
    for one in findings:
        advice = [f"    -> {one.advice}"] if one.advice else []
        for line in (f"{SIGNS[one.state]}  {one.name}: {one.value}", *advice):
            text = textwrap.fill(line, width, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)
            print(text)
    print()
    return [one.name for one in findings if one.state == "broken"]
