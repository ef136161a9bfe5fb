"""Pages as one HTML file each that needs no network: templates, their style and script, and the text of others escaped.

A page loads nothing, and no script runs but its own. The templates lie in `templates/`: `page.html` is the frame of all
pages, `parts.html` and `charts.html` hold what several of them show. In a template all text is escaped, and what is not
given is an error.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.callbacks.display import escape_control
from lit_rl.core.durable_files import flush, replacing
from lit_rl.core.errors import StorageError

if TYPE_CHECKING:
    import jinja2

_TEMPLATES = Path(__file__).with_name("templates")


@functools.cache
def templates() -> jinja2.Environment:
    """Return the templates. Their filter `tojson` writes ASCII that ends no element, and refuses NaN and infinity."""
    import jinja2  # here, as a run imports the modules of pages when it starts

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return found


def page(template: str, look: str, **shown: Any) -> str:
    """Return the whole file.

    Control characters become visible escapes wherever they stand, those that reorder a text among them.

    Args:
        template: Name of a template that extends `page.html`.
        look: Name of its style sheet and of its script, the only one that may run, without their endings.
        shown: What the template shows.
    """
    from markupsafe import Markup

    style, script = ((_TEMPLATES / f"{look}{end}").read_text(encoding="utf-8") for end in (".css", ".js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    ours = {"style": Markup(style), "script": Markup(script), "script_digest": digest}
    return escape_control(templates().get_template(template).render(**ours, **shown))


def write_atomically(target: Path, text: str) -> None:
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
