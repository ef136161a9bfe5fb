"""The YAMLs of the preference groups: each names a function of the package, under its own name, with its settings."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lit_rl.cli import schemas
from lit_rl.ops import preference_losses
from lit_rl.ops.preference_losses import Pairs

CONF = Path(__file__).parents[2] / "conf"
OTHERS = {"divergence": {"reverse_kl", "forward_kl", "js", "alpha"}, "verdict": {"kto", "apo_zero_unpaired"}}


@pytest.fixture(scope="module")
def composed():
    schemas.register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: compose(overrides=list(overrides)).algo


def files(group):
    return {path.stem for path in (CONF / "algo" / group).glob("*.yaml")}


def losses():
    elsewhere = {"Pairs", "alpha_divergence", "bco", "forward_kl", "js_divergence", "reverse_kl", *OTHERS["verdict"]}
    return set(preference_losses.__all__) - elsewhere


def test_every_function_has_a_file():
    assert files("preference") == losses()
    assert {group: files(group) for group in OTHERS} == OTHERS


def test_several_losses_stand_side_by_side(composed):
    chosen = composed(
        "+algo/preference=[sigmoid,bco_pair,sft]", "algo.preference.sigmoid.label_smoothing=0.1"
    ).preference
    assert list(chosen) == ["sigmoid", "bco_pair", "sft"]
    built = instantiate(chosen)
    assert built.sigmoid.keywords == {"label_smoothing": 0.1} and built.sft.func is preference_losses.sft


@pytest.mark.parametrize("name", sorted(losses()))
def test_each_loss_is_built_under_its_own_name(composed, name):
    (built,) = instantiate(composed(f"+algo/preference=[{name}]").preference, _convert_="all").values()
    assert isinstance(built, partial) and built.func is getattr(preference_losses, name)
    pairs = Pairs(*-torch.rand(4, 3), torch.ones(3), torch.ones(3))
    assert torch.equal(built(pairs, 0.1), getattr(preference_losses, name)(pairs, 0.1)), (
        "the defaults are the function's own"
    )


def test_an_unknown_setting_is_refused(composed):
    with pytest.raises(Exception, match="label_smoothing"):
        composed("+algo/preference=[hinge]", "algo.preference.hinge.label_smoothing=0.1")


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in OTHERS for name in sorted(OTHERS[group])])
def test_single_choices(composed, group, name):
    built = instantiate(composed(f"+algo/{group}={name}")[group])
    function = {"js": "js_divergence", "alpha": "alpha_divergence"}.get(name, name)
    assert built.func is getattr(preference_losses, function)
