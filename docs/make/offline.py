"""MkDocs calls this for every page: a page that would fetch something is a warning, and so fails a strict build."""

import logging
import re
from typing import Any

FETCHED = re.compile(
    r"<(?:script|img|iframe|link|video|source)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\s\"'>]+)"
)
log = logging.getLogger("mkdocs.plugins.offline")


def on_post_page(output: str, /, *, page: Any, **_: Any) -> str:
    """Warn of what a page would fetch from elsewhere."""
    for address in FETCHED.findall(output):
        log.warning("%s fetches %s", page.file.src_uri, address)
    return output
