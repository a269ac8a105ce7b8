"""The commands `node check`, `approve` and `audit`: check a node, approve what it tells, and show its messages."""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..core.errors import ConfigError
from ..deploy import require_flower
from .doctor import print_findings
from .main import FAILED
from .options import JsonOptions, NodeApproveOptions, NodeCheckOptions, parse_options

TIME_CHARS, RUN_CHARS = len("2026-01-31T12:00"), 6
CELL_CHARS, SENTENCE_CHARS = 40, 1000
"""Length of a cell, and of a cell with a sentence."""


def check(space: Namespace, problems: Sequence[str]) -> int:
    """Check a node, and print what was found; the exit code is 1 if something is broken."""
    from ..deploy.operate.check import check_node

    options = parse_options(NodeCheckOptions, space, problems)
    require_flower()
    findings = check_node(space.node, **options.model_dump(exclude={"json_"}))
    unchecked = ", ".join(one.name for one in findings if one.state == "note")
    if options.json_:
        broken = [one.name for one in findings if one.state == "broken"]
        print(json.dumps({"ready": not broken, "findings": [asdict(one) for one in findings]}, indent=2))
    elif broken := print_findings(findings):
        print(f"The node is not ready: {', '.join(dict.fromkeys(broken))}; the lines with -> say what to do.")
    else:
        print(f"The node is ready{f', as far as it was checked (not: {unchecked})' if unchecked else ''}.")
    return FAILED if broken else 0


def approve(space: Namespace, problems: Sequence[str]) -> int:
    """Approve what a node tells the server about its data, once the operator has read it; 1 if the operator says no."""
    from ..deploy.node.files import find_state
    from ..deploy.node.policy import approve_shared, read_shared

    options = parse_options(NodeApproveOptions, space, problems)
    folder = find_state(space.node)
    text, digest = read_shared(folder)
    print(text, end="")
    print(f"SHA-256 {digest}")
    if options.digest is None and sys.stdin.isatty():
        if input("Approve that the node tells the server exactly this? [y/N] ").strip().lower() not in {"y", "yes"}:
            print("Not approved.")
            return 1
    elif options.digest != digest:
        raise ConfigError(
            f"--digest: got {options.digest or 'nothing'}, expected {digest}, which names the text above; read the "
            "text, then repeat the command with this option"
        )
    approve_shared(folder, text)
    print("Approved: the node may tell the server exactly this.")
    return 0


def audit(space: Namespace, problems: Sequence[str]) -> int:
    """Verify and print the log of a node's messages; the exit code is 1 if the log was changed."""
    options = parse_options(JsonOptions, space, problems)
    require_flower()
    from ..deploy.node.files import find_state
    from ..deploy.operate.audit import AuditLog

    log = AuditLog(find_state(space.node))
    problem = log.verify()
    lines = [line for line in log.read() if line]
    if options.json_:
        print(json.dumps({"problem": problem, "lines": lines}, indent=2))
        return FAILED if problem else 0
    if problem:
        print(f"The log is not as the node wrote it: {problem}. Compare it with a copy.")
    else:
        print(
            f"The chain of {len(lines)} lines is whole. Only a copy of the last hash on another machine shows whether "
            "somebody made the whole log anew."
        )
    print()
    _print_lines(lines)
    return FAILED if problem else 0


def _print_lines(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each message, and the totals of each kind. A changed line may hold anything."""
    from ..analysis.output.tables import make_console, make_table

    console = make_console()
    titles = ("time (UTC)", "way", "message", "run", "method", "seed", "round", "tensors", "bytes")
    table = make_table(*titles, text_columns=titles[:5])
    counts, totals = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for line in lines:
        way, kind, purpose = (_format(line.get(key), SENTENCE_CHARS) for key in ("direction", "kind", "purpose"))
        token, *run = (_format(line.get(key)) for key in ("token", "algorithm", "seed", "round"))
        size, tensors = line.get("bytes"), line.get("tensors")
        n_tensors = f"{len(tensors):,}" if isinstance(tensors, list) else "?"
        n_bytes = f"{size:,}" if isinstance(size, int) else "?"
        time = str(line.get("time", ""))[:TIME_CHARS]
        table.add_row(*map(_format, [time, way, kind, token[:RUN_CHARS], *run, n_tensors, n_bytes]))
        counts[way, kind, purpose] += 1
        totals[way, kind, purpose] += size if isinstance(size, int) else 0
    console.print(table)
    summary = make_table("way", "message", "messages", "bytes", text_columns=("way", "message"))
    for key, n in counts.items():
        summary.add_row(*key[:2], f"{n:,}", f"{totals[key]:,}")
    console.print(summary)
    print()
    for way, kind, purpose in counts:  # sentences, too long for a column
        print(f"{way} {kind}: {purpose}")


def _format(value: Any, length: int = CELL_CHARS) -> str:
    """Format what the server or a stranger wrote: no control characters, which a terminal would obey."""
    if value is None:
        return "-"
    text = str(value)
    text = text[:length] + "..." * (len(text) > length)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
