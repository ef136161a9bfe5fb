"""Checkpoints of a run: half-used rollouts as plain values, checks at a resume, and resumes with another world size.

A half-used rollout is kept as tensors, numbers and strings, so that a checkpoint loads with `weights_only=True`.

A rollout, and a step of a data set, are the same rows whatever the number of processes. Their batches are not, so after
a change of the world size counts of batches become counts of whole rollouts or steps: a half-used one is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.rollouts.rollout_plan import mix
from lit_rl.core.episode import Episode
from lit_rl.core.errors import StorageError
from lit_rl.core.rollout import Completions, Rollout
from lit_rl.core.vision_inputs import Later, PromptVision, Vision
from lit_rl.core.visuals import ImageRef, VideoRef, Visual
from lit_rl.data.loaders import whole_steps
from lit_rl.data.visual_prompts import Processor, PromptVisuals
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.references import Auto, Copy, Reference

# ---------------------------------------------------------------------- half-used rollouts


_VISUAL = "lit_rl visual"
"""The only key of a mapping that stands for an image in the messages of an episode."""


def to_plain(item: Any) -> Any:
    """Return plain values: dicts for dataclasses, copies on the CPU for tensors, rows of the data for images.

    Host copies of rows on a device (`Completions.host`) are left out.
    """
    if isinstance(item, Tensor):
        return item.detach().cpu().clone()
    if isinstance(item, Vision):
        used = item.used()
        sources = [None if each is None or not each.from_environment else _source(each) for each in used.prompts]
        of_environments: dict[str, Any] = {"given": sources} if any(sources) else {}
        if used.later:
            of_environments["later"] = [
                [
                    {
                        "column": image.column,
                        "tokens": image.tokens,
                        "per_token": dict(image.seen.per_token),
                        "shown": _source(image.seen),
                    }
                    for image in images
                ]
                for images in used.later
            ]
        # Values of tokens are kept, as an episode's prompt may have more of them than the data's row.
        return {
            "rows": [-1 if prompt is None else prompt.row for prompt in used.prompts],
            "index": used.index,
            "per_token": [{} if prompt is None else dict(prompt.per_token) for prompt in used.prompts],
            **of_environments,
        }
    if isinstance(item, ImageRef | VideoRef):  # in the messages of an episode
        return {_VISUAL: _plain_visual(item)}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: to_plain(getattr(item, f.name)) for f in dataclasses.fields(item) if f.name != "host"}
    if isinstance(item, Mapping):
        return {key: to_plain(value) for key, value in item.items()}
    if isinstance(item, list):
        return [to_plain(each) for each in item]
    if isinstance(item, tuple) and any(map(dataclasses.is_dataclass, item)):
        return [to_plain(each) for each in item]
    return item


def _source(seen: PromptVision) -> dict[str, Any]:
    """Return the text and the encoded images of an environment, from which pixels are made again."""
    source = seen.source
    assert isinstance(source, PromptVisuals)
    return {"text": source.text, "where": source.where, "images": [_plain_visual(each) for each in source.visuals]}


def _plain_visual(visual: Visual) -> dict[str, Any]:
    if isinstance(visual, VideoRef):
        return {"frames": [_plain_visual(frame) for frame in visual.frames], "fps": visual.fps}
    # As uint8: a checkpoint that is loaded with `weights_only` holds no bytes.
    data = torch.frombuffer(bytearray(visual.read()), dtype=torch.uint8)
    return {"name": visual.name, "width": visual.width, "height": visual.height, "data": data}


def _visuals_from_plain(plain: Mapping[str, Any]) -> PromptVisuals:
    return PromptVisuals(plain["text"], tuple(map(_visual_from_plain, plain["images"])), plain["where"])


def _visual_from_plain(plain: Mapping[str, Any]) -> Visual:
    if "frames" in plain:
        return VideoRef(tuple(map(_image_from_plain, plain["frames"])), plain["fps"])
    return _image_from_plain(plain)


def _image_from_plain(plain: Mapping[str, Any]) -> ImageRef:
    return ImageRef.held(plain["name"], plain["width"], plain["height"], bytes(plain["data"].cpu().numpy()))


def _with_visuals(plain: Any) -> Any:
    """Return messages with their images, from the plain values of `to_plain`."""
    if isinstance(plain, Mapping):
        if plain.keys() == {_VISUAL}:
            return _visual_from_plain(plain[_VISUAL])
        return {key: _with_visuals(value) for key, value in plain.items()}
    return [_with_visuals(each) for each in plain] if isinstance(plain, list) else plain


def to_device(item: Any, device: torch.device) -> Any:
    """Return the same plain structure with its tensors on `device`."""
    if isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {key: to_device(value, device) for key, value in item.items()}
    return item


def to_device_dataclass(item: Any, device: torch.device) -> Any:
    """Return a dataclass with its tensors, and those of dataclasses inside it, on `device`."""
    if isinstance(item, Vision):
        return item  # each pass moves it to a device
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {f.name: to_device_dataclass(getattr(item, f.name), device) for f in dataclasses.fields(item)}
        return dataclasses.replace(item, **fields)
    return to_device(item, device)


def completions_from_plain(plain: dict[str, Any], device: torch.device) -> Completions:
    """Return the completions for the plain values of `to_plain`."""
    episodes, vision = plain.get("episodes"), plain.get("vision")
    return Completions(
        **to_device(plain, device)
        | {"episodes": None if episodes is None else tuple(Episode(**_with_visuals(each)) for each in episodes)}
        | {"vision": None if vision is None else _vision_without_pixels(vision)}
    )


def _vision_without_pixels(plain: Mapping[str, Any]) -> Vision:
    """Return the vision without pixels, with the rows of the data, from which `restore_pixels` makes them."""
    rows = plain["rows"]
    sources = plain.get("given") or [None] * len(rows)
    prompts = []
    for row, values, source in zip(rows, plain["per_token"], sources, strict=True):
        per_token = {name: value.cpu() for name, value in values.items()}
        origin = {} if source is None else {"source": _visuals_from_plain(source), "from_environment": True}
        known = row >= 0 or source is not None
        prompts.append(PromptVision({}, per_token, row=row, **origin) if known else None)
    later = []
    for images in plain.get("later") or ():
        of_row = []
        for image in images:
            per_token = {name: value.cpu() for name, value in image["per_token"].items()}
            seen = PromptVision({}, per_token, source=_visuals_from_plain(image["shown"]))
            of_row.append(Later(image["column"], seen, image["tokens"]))
        later.append(tuple(of_row))
    return Vision(prompts, plain["index"].cpu(), later)


def restore_pixels(
    item: Any, see: Callable[[int], PromptVision | None], processor: Callable[[], Processor | None] = lambda: None
) -> Any:
    """Return a loaded rollout or completions with the pixels of their rows.

    Args:
        item: The result of `rollout_from_plain` or `completions_from_plain`.
        see: Function from the number of a training row to its pixels: `RolloutDataModule.vision`.
        processor: Function that returns the policy's processor, for images of environments.
    """
    if isinstance(item, Rollout):
        return dataclasses.replace(item, completions=restore_pixels(item.completions, see, processor))
    if item.vision is None:
        return item

    def with_pixels(prompt: PromptVision) -> PromptVision | None:
        source = prompt.source
        if source is None:
            found = see(prompt.row)
            return found and dataclasses.replace(found, per_token=prompt.per_token)
        maker = processor()
        assert isinstance(source, PromptVisuals) and maker is not None
        found = source.vision(maker, prompt.row)
        assert found is not None
        return dataclasses.replace(found, per_token=prompt.per_token, from_environment=prompt.from_environment)

    prompts = [None if prompt is None else with_pixels(prompt) for prompt in item.vision.prompts]
    later = [
        tuple(dataclasses.replace(image, seen=with_pixels(image.seen)) for image in row) for row in item.vision.later
    ]
    return dataclasses.replace(item, vision=Vision(prompts, item.vision.index, later))


def rollout_from_plain(plain: dict[str, Any], device: torch.device) -> Rollout:
    """Return the rollout for the plain values of `to_plain`."""
    completions = completions_from_plain(plain["completions"], device)
    return Rollout(**{**to_device(plain, device), "completions": completions})


# ---------------------------------------------------------------------- checks at a resume


_EXPORT_HINT = (
    "To go on from what that run learned with another algorithm or model settings, start a new run from its exported "
    "model, without ckpt_path: model=local model.name=<run_dir>/hf, or of lit-rl fit --model.model=<run_dir>/hf. Of a "
    "run that has not ended, lit-rl export run_dir=<run_dir> writes it."
)


class SavedState(dict[str, Any]):
    """A part of a checkpoint. Reading a missing key raises a StorageError, not a KeyError, which would be a defect.

    Args:
        state: The state in the checkpoint.
        lacks: Function from a missing key to the error message.
    """

    def __init__(self, state: Mapping[str, Any], lacks: Callable[[str], str]) -> None:
        super().__init__(state)
        self._lacks = lacks

    def __missing__(self, key: str) -> Any:
        raise StorageError(self._lacks(key))


def saved_by_algorithm(state: Mapping[str, Any], algorithm: str) -> SavedState:
    """Return the state of a rank; a missing key means that another algorithm wrote it."""
    return SavedState(
        state,
        lambda key: (
            f"The checkpoint is of another algorithm: it holds no {key} as {algorithm} needs. Resume with the algo of "
            f"the run's config.yaml. {_EXPORT_HINT}"
        ),
    )


def saved_by_term(terms: Mapping[str, Mapping[str, Any]], name: str, term: str) -> SavedState:
    """Return the state of a term of the objective.

    Args:
        terms: States of all terms, by their names below `algo`.
        name: Name of this term.
        term: Class that reads it.

    Raises:
        StorageError: there is none.
    """
    message = (
        f"The checkpoint holds no state of algo.{name} for {term}. Resume with the algo/{name} of the run's "
        "config.yaml."
    )
    if name not in terms:
        raise StorageError(message)
    return SavedState(terms[name], lambda key: message)


def algorithm_kind(algorithm: type) -> str:
    """Return the name that identifies an algorithm in checkpoints: that of its nearest class of lit_rl.

    A user's subclass may change its name.
    """
    return next(each.__name__ for each in algorithm.__mro__ if each.__module__.partition(".")[0] == "lit_rl")


def check_algorithm_kind(checkpoint: Mapping[str, Any], algorithm: type) -> None:
    """Refuse to resume a checkpoint of another algorithm, or of another package. Other settings of a class pass.

    So do empty mappings, of DeepSpeed's folders: their algorithm is not known before they are loaded.

    Raises:
        StorageError: names both.
    """
    writer, wanted = checkpoint.get("algorithm", "no method of lit_rl"), algorithm_kind(algorithm)
    if checkpoint and writer != wanted:
        raise StorageError(
            f"The checkpoint is of another algorithm: {writer} wrote it, and this run trains with {wanted}. Resume "
            f"with the algo of the run's config.yaml. {_EXPORT_HINT}"
        )


def check_precision(before: str, now: str) -> None:
    """Refuse `trainer.precision=auto` if it is another precision than that of the run that wrote the checkpoint.

    Raises:
        StorageError: names both.
    """
    if now != before:
        raise StorageError(
            f"The checkpoint was made with trainer.precision={before}, and trainer.precision=auto is {now} on "
            f"this machine. Set trainer.precision={before} to go on as the run began, or {now} to change it."
        )


def check_reference_began(model: LanguageModel, reference: Reference) -> None:
    """Refuse to resume with a model object that was trained in place, if the reference would be a copy of it.

    Raises:
        StorageError: it was.
    """
    trained = isinstance(model, LoadedModel) and model.began_trained
    if trained and isinstance(reference, Copy | Auto):
        raise StorageError(
            "The run is to be resumed with an object as model that was trained in place since it was loaded, and "
            "the reference would be a copy of what it learned. Load it anew (from_pretrained), and give that."
        )


def load_reference(reference: Reference, scorer: Any, checkpoint: Mapping[str, Any], *, required: bool) -> None:
    """Restore a reference that follows the policy.

    Args:
        reference: The reference.
        scorer: Its model, which is loaded.
        checkpoint: The checkpoint.
        required: Whether its weights must be there.

    Raises:
        StorageError: they are required and missing.
    """
    if "reference" in checkpoint:
        reference.load_state(scorer, checkpoint["reference"])
    elif required:
        raise StorageError(
            f"reference={type(reference).__name__} changes during training, and the checkpoint lacks its "
            "weights. Resume with the reference and the KL settings of the run's config.yaml."
        )


# ---------------------------------------------------------------------- random generators


class GlobalGenerators:
    """torch's global generators, from which dropout and Clip-Cov draw: seeded for a run, or restored."""

    def __init__(self) -> None:
        self._saved: Mapping[str, Tensor] | None = None
        self.seed_by_step = False
        """True after a change of the world size: no rank's saved state is this one's."""

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Keep the `rng_state` of a checkpoint until `start`."""
        self._saved = saved

    def start(self, seed: int, rank: int, step: int, device: torch.device) -> None:
        """Restore the saved state once; otherwise seed: equal in every run, different on every rank."""
        if self._saved is not None:
            set_rng_state(self._saved, device)
            self._saved = None
        else:
            torch.manual_seed(mix(seed, rank, step) if self.seed_by_step else mix(seed, rank))


def rng_state(device: torch.device | str) -> dict[str, Tensor]:
    """Return the states of torch's global generators, by type of device: the CPU's, and that of the run's device.

    Dropout and Clip-Cov draw from them, samples never do.
    """
    return {kind: _generator(kind).get_rng_state() for kind in ("cpu", torch.device(device).type)}


def set_rng_state(state: Mapping[str, Tensor], device: torch.device | str) -> None:
    """Restore the states of the generators. Those of other types of devices are skipped."""
    for kind in {"cpu", torch.device(device).type} & state.keys():
        _generator(kind).set_rng_state(state[kind].cpu())


def _generator(kind: str) -> Any:
    return torch if kind == "cpu" else torch.get_device_module(kind)


def trained_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the tensors that training changes, by name: parameters with gradient, and saved buffers.

    Args:
        modules: The trained modules, by the attribute names that they have in checkpoints.
    """
    return {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad
    }


def check_trained_tensors(saved: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Refuse a checkpoint of another model: every trained tensor must be there, in its shape.

    Raises:
        StorageError: lists what is missing, unexpected or of another shape.
    """
    missing = sorted(expected.keys() - saved.keys())
    extra = sorted(saved.keys() - expected.keys())
    shapes = [
        f"{name}: {tuple(saved[name].shape)} in the checkpoint, {tuple(expected[name].shape)} in the model"
        for name in sorted(expected.keys() & saved.keys())
        if saved[name].shape != expected[name].shape
    ]
    if missing or extra or shapes:
        found = [f"missing {missing[:5]}" * bool(missing), f"unexpected {extra[:5]}" * bool(extra), *shapes[:5]]
        raise StorageError(
            "The checkpoint is not of this model: " + "; ".join(part for part in found if part) + ". Resume with the "
            f"algorithm, model and adapter settings of the run's config.yaml. {_EXPORT_HINT}"
        )


# ---------------------------------------------------------------------- another world size


_PROGRESS = "epoch_loop.batch_progress"


def count_processes(count: int) -> str:
    """Return the number of processes as text."""
    return "1 process" if count == 1 else f"{count} processes"


def of_other_ranks(
    checkpoint: Mapping[str, Any], algorithm: str, *, world_size: int, slots: int, epoch: int
) -> tuple[list[SavedState], int]:
    """Advance Lightning's loops of a checkpoint of other ranks to the end of the rollout or step that was begun last.

    The loader does so itself.

    Args:
        checkpoint: The checkpoint, whose loops are changed in place.
        algorithm: The class that reads it, for messages.
        world_size: World size of this run.
        slots: Batches of a rollout, or of a step of a data set, in this run.
        epoch: Batches of an epoch of this run.

    Returns:
        The state of each rank that wrote it, and the batches of a rollout or step there.

    Raises:
        StorageError: the checkpoint holds no state of a loader of lit_rl.
    """
    loops, ranks = checkpoint["loops"], checkpoint["lit_rl"]
    before = slots_when_written(loops, len(ranks), world_size)
    progress = loops["fit_loop"][_PROGRESS]
    total, current = progress["total"], progress["current"]
    ready = whole_steps(current["ready"], before) * slots
    earlier_epochs = (total["ready"] - current["ready"]) // before * slots
    # Lightning infers from their differences in which hook a checkpoint was written.
    progress["current"] = _shifted(current, ready)
    progress["total"] = _shifted(total, earlier_epochs + ready)
    progress["is_last_batch"] = ready >= epoch
    return [saved_by_algorithm(each["module"], algorithm) for each in ranks], before


def describe_other_ranks(wrote: int, world_size: int, dropped: str) -> str:
    """Return the notice of a resume with another number of ranks.

    Args:
        wrote: World size of the run that wrote the checkpoint.
        world_size: World size of this run.
        dropped: A sentence about the state that is dropped.
    """
    return (
        f"The checkpoint was written by {count_processes(wrote)}, and this run has {world_size}. {dropped} Steps have "
        f"as many rows as before, a process {wrote / world_size:g} times as many."
    )


def slots_when_written(loops: Mapping[str, Any], wrote: int, world_size: int) -> int:
    """Return the batches of a rollout, or of a step of a data set, in the run that wrote the checkpoint.

    Args:
        loops: Lightning's loops in the checkpoint.
        wrote: World size of the run that wrote it.
        world_size: World size of this run.

    Raises:
        StorageError: the checkpoint holds no state of a loader of lit_rl.
    """
    loaders = loops["fit_loop"]["state_dict"].get("combined_loader") or [{}]
    if "slots" not in loaders[0]:
        raise StorageError(
            f"The checkpoint was written by {count_processes(wrote)} and this run has {world_size}, and it holds no "
            "state of the data loader, from which a run with another number of processes finds its place. Resume with "
            f"as many processes (trainer.devices={wrote}, times trainer.num_nodes), or start a new run from the "
            "exported model: model.name=<run_dir>/hf."
        )
    return loaders[0]["slots"]


def _shifted(counts: Mapping[str, int], ready: int) -> dict[str, int]:
    return {name: ready + count - counts["ready"] for name, count in counts.items()}
