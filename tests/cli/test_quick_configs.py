"""What the suite composes quickly is what Hydra composes: values, types, flags and parents of every node."""

from __future__ import annotations

from typing import Any

import pytest
import quick_configs
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig

from lit_rl.cli import schemas

COMMANDS = [
    ["algo=ppo", "algo/critic=shared_trunk", "optimizer.betas=[0.9,0.99]", "model.lora.r=2"],
    ["algo=dpo", "data.path=rows.jsonl", "+callbacks.mine={_target_: my.Callback, every: [1, {two: 2}]}"],
    ["experiment=rloo_addition", "~callbacks.samples", "seed=${oc.env:SEED,3}"],
]


def described(node: Any, parent: Any = None) -> Any:
    """A node and what is below it; its parent is the one that holds it."""
    assert parent is None or node._parent is parent, node._get_full_key(None)
    known = vars(node._metadata) | {"resolver_cache": set(node._metadata.resolver_cache)}  # it holds the time
    inside = node.__dict__["_content"] if isinstance(node, DictConfig | ListConfig) else node._value()
    if isinstance(inside, dict):
        inside = {key: described(value, node) for key, value in inside.items()}
    elif isinstance(inside, list):
        inside = [described(value, node) for value in inside]
    return type(node), known, inside


def composed(overrides: list[str]) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        return described(compose("config", ["run_dir=run", *overrides], return_hydra_config=True))


@pytest.mark.all
def test_what_is_composed_quickly_is_what_hydra_composes(configs_are_composed_quickly: pytest.MonkeyPatch) -> None:
    schemas.register_schemas()
    quickly = [composed(overrides) for overrides in (*COMMANDS, COMMANDS[0])]
    assert quickly[0] == quickly[-1], "nothing of one composition stays in the next"
    configs_are_composed_quickly.undo()
    try:
        assert [composed(overrides) for overrides in COMMANDS] == quickly[:-1]
    finally:
        quick_configs.install(configs_are_composed_quickly)
        GlobalHydra.instance().clear()
