"""Warn of pages that would fetch something from the network; MkDocs calls the hook, and a strict build then fails."""

import logging
import re
from typing import Any

FETCHED = re.compile(r"<(?:script|img|iframe|link|video|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)")
MERMAID = re.compile(r"<\w+ class=[\"']mermaid[\"']")
"""A diagram that the theme draws with a script from a public server."""
log = logging.getLogger("mkdocs.plugins.offline")


def on_post_page(output: str, /, *, page: Any, **_: Any) -> str:
    """Warn of addresses that a page would load, and of diagrams whose script would be loaded."""
    for address in FETCHED.findall(output):
        log.warning("%s fetches %s", page.file.src_uri, address)
    if MERMAID.search(output):
        log.warning("%s fetches Mermaid; draw the diagram as SVG", page.file.src_uri)
    return output
