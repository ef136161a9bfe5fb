"""One HTML file that needs no network: it loads nothing, no script runs but its own, and foreign text stays text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

from lit_rl.callbacks.text import visible
from lit_rl.durable import flush, replacing
from lit_rl.errors import StorageError


def safe(text: str) -> str:
    """Escape untrusted text for an element or an attribute in quotes; control characters become visible escapes."""
    return html.escape(visible(text))


def data(value: Any) -> str:
    """Return a value for the page's script to parse: ASCII JSON in which no tag can end or begin.

    Raises:
        ValueError: there is NaN or infinity in it, which JSON has not.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def document(title: str, style: str, body: str, script: str, *, attributes: str = "", images: bool = False) -> str:
    """Return the whole file.

    Args:
        title: Plain text.
        style: The style sheet.
        body: Markup, with everything foreign in it `safe`.
        script: The only one that may run. It ends the body.
        attributes: Attributes of the body.
        images: Allow images that the body holds itself.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    seen = "img-src data:; " if images else ""
    policy = f"default-src 'none'; {seen}style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{style}</style></head>"
        f"<body{attributes and ' ' + attributes}>{body}<script>{script}</script></body></html>\n"
    )


def write(target: Path, text: str) -> None:
    """Write a file beside the target, then rename it: the target is whole or as it was.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with replacing(target) as partial:
            partial.write_text(text, encoding="utf-8")
            flush(partial)
    except OSError as error:
        raise StorageError(f"{target} could not be written: {error.strerror}.") from error
