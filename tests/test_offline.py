"""A hub whose name has no address is found out at once, once, and in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from lit_rl.core import machine
from lit_rl.core.errors import BackendError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may ask the hub, whatever other tests have set, and is as it was afterwards."""
    import datasets
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(machine, "_offline_by_lit_rl", False)
    for name in machine._PROXIES:
        monkeypatch.delenv(name, raising=False)


def is_offline() -> bool:
    import datasets
    import huggingface_hub

    states = {huggingface_hub.is_offline_mode(), datasets.config.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] == "1"}
    assert len(states) == 1
    return states.pop()


def test_it_is_said_once_and_undone_when_the_name_has_an_address(asked, monkeypatch, capsys):
    for _ in range(2):
        machine.go_offline_if_unreachable()
    assert is_offline() and capsys.readouterr().err.count("hub.invalid") == 1
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [("an address of", host, port)])
    machine.go_offline_if_unreachable()
    assert not is_offline() and not capsys.readouterr().err


def test_a_proxy_looks_names_up_itself(asked, monkeypatch):
    for proxy in machine._PROXIES:
        with monkeypatch.context() as patch:
            patch.setenv(proxy, "http://127.0.0.1:1")
            machine.go_offline_if_unreachable()
        assert not is_offline()


def test_what_the_user_has_set_stays(asked, monkeypatch):
    import huggingface_hub

    machine._use_hub(False)
    monkeypatch.setattr(machine, "_offline_by_lit_rl", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    machine.go_offline_if_unreachable()
    assert is_offline()


def test_another_hub_that_is_there_is_asked(asked, monkeypatch):
    import huggingface_hub

    machine.go_offline_if_unreachable()
    assert is_offline()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    machine.go_offline_if_unreachable()
    assert not is_offline()


def test_a_look_up_that_hangs_is_no_address(asked, monkeypatch):
    monkeypatch.setattr(machine, "_LOOK_UP_TIMEOUT", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: time.sleep(5))
    machine.go_offline_if_unreachable()
    assert is_offline()


def test_why_nothing_can_be_sent_is_found_out_within_seconds(asked, monkeypatch):
    """No address; a closed port; an address that does not answer, as `connect` says it; then a hub that is there."""
    from huggingface_hub import constants

    assert str(machine.why_hub_is_unreachable()).endswith("hub.invalid cannot be reached: its name has no address")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert str(machine.why_hub_is_unreachable()).endswith("127.0.0.1 cannot be reached: Connection refused")
    with monkeypatch.context() as patch, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        patch.setattr(machine, "_LOOK_UP_TIMEOUT", 0.1)
        patch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{full.getsockname()[1]}")
        waiting = [socket.socket() for _ in range(4)]  # Linux takes one more than the backlog
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        assert str(machine.why_hub_is_unreachable()).endswith("cannot be reached: timed out")
        for each in waiting:
            each.close()
    machine._use_hub(False)
    with socket.create_server(("127.0.0.1", 0)) as there:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{there.getsockname()[1]}")
        assert machine.why_hub_is_unreachable() is None and not is_offline()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(machine, "_offline_by_lit_rl", False)
    assert "HF_HUB_OFFLINE is set" in str(machine.why_hub_is_unreachable())


@pytest.mark.all
@pytest.mark.parametrize("words", ["model=owner/absent", "data=jsonl data.path=owner/absent data.split=train"])
def test_a_run_says_so_in_two_lines_and_tries_nothing_again(words, tmp_path):
    settings = {"HF_ENDPOINT": "https://hub.invalid", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    from lit_rl import __file__ as package

    root = os.path.dirname(os.path.dirname(package))
    command = [sys.executable, os.path.join(root, "train.py"), *words.split(), "trainer.accelerator=cpu"]
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True)
    assert ran.returncode == BackendError("").exit_code, ran.stderr
    assert ran.stderr.count("hub.invalid cannot be reached") == 1
    assert "Retry" not in ran.stderr and "Traceback" not in ran.stderr and "owner/absent" in ran.stderr
