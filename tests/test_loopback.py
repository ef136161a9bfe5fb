"""Which addresses are this machine: a key may be left out there, plain HTTP is allowed, proxies are not used."""

from __future__ import annotations

import pytest

from lit_rl.core.machine import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_these_lead_back(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "10.0.0.1", "127.example.org", "localhost.example.org"])
def test_these_may_lead_elsewhere(host):
    assert not is_loopback(host)
