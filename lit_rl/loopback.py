"""Addresses that lead back to this machine, whatever its network. Standard library only."""

from __future__ import annotations

import ipaddress

NAME = "localhost"


def is_loopback(host: str | None) -> bool:
    """Tell whether a host is this machine itself: `localhost`, 127.0.0.0/8, ::1. A name is not looked up."""
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == NAME
