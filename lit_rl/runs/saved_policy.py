"""The policy of a run's checkpoint, loaded into a module by commands that do not train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.callbacks.checkpoint_io import fault_of_contents, unusable_checkpoint, verify_once
from lit_rl.core import upstream
from lit_rl.models.language_model import LanguageModel


def load_saved_weights(module: PolicyModule, checkpoint: Path, extra_keys: Sequence[str] = ()) -> int:
    """Make a module's models, give them the weights of a checkpoint, as a resumed run does, and return the optimizer
    steps that they have taken.

    Args:
        module: A module without models yet.
        checkpoint: The file.
        extra_keys: Keys of the checkpoint that the module reads too, such as `reference`.

    Raises:
        StorageError: it is no checkpoint of a run, is damaged, or is another model's.
    """
    module.configure_model()
    verify_once(checkpoint)
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        weights = {name: tensor for name, tensor in saved["state_dict"].items() if name.startswith("policy.")}
        step, extra = int(saved["global_step"]), {key: saved[key] for key in ("run", *extra_keys) if key in saved}
    except Exception as error:  # an unpickler fails on a file of another kind in every way there is
        raise unusable_checkpoint(checkpoint, fault_of_contents(error)) from error
    module.on_load_checkpoint({"state_dict": weights, **extra})  # refuses another model's
    module.load_state_dict(weights, strict=False)
    return step


def load_policy(model: LanguageModel, fabric: L.Fabric, *, seed: int, checkpoint: Path | None = None) -> Any:
    """Return a policy on its device, with the weights of a checkpoint if one is given, else the model's own.

    Args:
        model: The model.
        fabric: Device and precision.
        seed: Seed of weights that begin at random.
        checkpoint: The file.
    """
    module = PolicyModule(model, seed=seed)
    if checkpoint is None:
        module.configure_model()
    else:
        load_saved_weights(module, checkpoint)
    upstream.convert_precision(fabric, module)
    return module.policy.to(fabric.device)
