"""True if the hub can be asked at all. Where its name has no address, that is found out once and said in one line."""

from __future__ import annotations

import os
import socket
import sys
import threading
from urllib.parse import urlsplit

_PATIENCE = 3.0
"""Seconds for one name resolution: a name server that does not answer would take half a minute."""

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


_closed = False
"""True if this module has set `HF_HUB_OFFLINE`, and not the user."""


def read_the_cache_alone_where_there_is_no_hub() -> None:
    """Set `HF_HUB_OFFLINE=1` while the hub's name cannot be resolved; called before a hub id is read.

    Otherwise Hugging Face's libraries try every file six times, a minute in all, and then fail with the same message.
    Child processes inherit it. Nothing is done behind a proxy, which resolves names itself, or if the user has set
    `HF_HUB_OFFLINE`.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    set_by_the_user = constants.HF_HUB_OFFLINE and not _closed
    if host is None or set_by_the_user or _behind_a_proxy():
        return
    there = _has_address(host)
    if there and _closed:  # a notebook whose machine has found its network again
        _ask_the_hub(True)
    elif not there and not _closed:
        sys.stderr.write(f"{host} cannot be reached (its name has no address): the local cache alone is read.\n")
        _ask_the_hub(False)


def why_unreachable() -> str | None:
    """Return the reason why nothing can be sent to the hub, within a few seconds; None if a connection to it opens.

    Hugging Face's client has no limit of time on a connection, which the system gives up after minutes where nothing
    answers. Nothing is checked behind a proxy.
    """
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if address.hostname is None or _behind_a_proxy():
        return None
    if constants.HF_HUB_OFFLINE and not _closed:
        return "HF_HUB_OFFLINE is set, which forbids to ask it"
    if not _has_address(address.hostname):
        return f"{address.hostname} cannot be reached: its name has no address"
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname, port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    if _closed:  # it had no address when the run began
        _ask_the_hub(True)
    return None


def _behind_a_proxy() -> bool:
    return any(os.environ.get(name) for name in _PROXIES)


def _ask_the_hub(ask: bool) -> None:
    global _closed
    from huggingface_hub import constants

    _closed = not ask
    os.environ["HF_HUB_OFFLINE"] = "0" if ask else "1"
    constants.HF_HUB_OFFLINE = not ask
    if datasets := sys.modules.get("datasets"):  # it has read the setting already
        datasets.config.HF_HUB_OFFLINE = not ask


def _has_address(host: str) -> bool:
    found: list[bool] = []

    def look_up() -> None:
        try:
            found.append(bool(socket.getaddrinfo(host, 443)))
        except OSError:
            found.append(False)

    # A thread, because name resolution has no timeout.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(found and found[0])
