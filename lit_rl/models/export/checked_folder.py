"""A Hugging Face folder that appears whole and checked, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from torch import Tensor

from lit_rl.durable import flush_tree, is_full, tried_again
from lit_rl.errors import LitRLError, StorageError
from lit_rl.models.export.adapter_folder import sort_names
from lit_rl.models.export.names import without_folders
from lit_rl.models.export.probe import Probe
from lit_rl.models.export.verify import verify_adapter
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.named import SHIPPED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_STAGED, _REPLACED = ".tmp-", ".old-"
"""Marks between the name of a folder and the number of the process: a folder that is not whole yet, and one that is
about to be replaced."""


@dataclass(frozen=True)
class ExportReport:
    """An export that was written, and the proof of it."""

    folder: Path
    adapter: Path | None
    """The LoRA adapter by itself; None where the policy has none."""
    tensors: int
    """Tensors of the state dict, all of them compared after a reload."""
    parameters: int
    """Numbers in them, tied weights counted once."""
    dtype: str
    max_abs_diff: float
    """Largest difference between a weight and its reload: 0, or the export fails."""
    logits: Mapping[str, float]
    """Largest difference of a logit on a short text, by what was compared with what: the model and, by itself, the
    adapter over its base, each from the trained policy."""
    note: str = ""
    """A warning about the adapter by itself; empty where there is none."""

    def __str__(self) -> str:
        details = "".join(
            f"; logits of {what[0].lower()}{what[1:]}: {difference:.1e}" for what, difference in self.logits.items()
        )
        details += f"; {self.note}" if self.note else ""
        return f"verified: {self.tensors} tensors reloaded, largest difference {self.max_abs_diff:g}{details}"


def write_checked(
    folder: str | Path,
    description: LanguageModel,
    rebuild: Callable[[], Any],
    check: Callable[[Path, Mapping[str, Tensor], LanguageModel, Probe], float],
    card: str,
    probe: Probe,
) -> ExportReport:
    """Write a model as a folder that appears whole and checked, or not at all.

    Args:
        folder: A new folder, or an earlier export, which is replaced.
        description: What the model was loaded from.
        rebuild: Makes the model on the CPU, once the folder is known to be free, and again for each further try on a
            full disk; with adapters they are merged, and stand by themselves in ``folder/adapter``.
        check: Reads what was written and gives the largest difference from the state.
        card: Text of README.md.
        probe: What the trained model says, for the check, and for the adapter by itself.

    Raises:
        StorageError: as `export_policy`.
    """
    target = Path(folder).expanduser().resolve()
    _check_target(target, description)
    try:
        return tried_again(
            lambda: _written(target, description, rebuild, check, card, probe), f"The export to {target}"
        )
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError)) and not is_full(error):
            raise
        left = "Nothing of it is left, and what was there before is as it was"
        way_out = ": make room, and say the command again (of a run: with ckpt_path=last)" if is_full(error) else ""
        raise StorageError(f"The export to {target} failed: {error}. {left}{way_out}.") from error


def _written(
    target: Path,
    description: LanguageModel,
    rebuild: Callable[[], Any],
    check: Callable[[Path, Mapping[str, Tensor], LanguageModel, Probe], float],
    card: str,
    probe: Probe,
) -> ExportReport:
    """Write once. The model is rebuilt for it, as writing merges its adapters."""
    rebuilt = rebuild()
    staged = target.with_name(f".{target.name}{_STAGED}{os.getpid()}")
    try:
        staged.mkdir(parents=True)
        model = _write(staged, rebuilt, description)
        state = model.state_dict()
        difference = check(staged, state, description, probe)
        note = "" if rebuilt is model else _prove_adapter(staged / "adapter", description, probe)
        readme = f"{card}\nNote: {without_folders(note)}.\n" if note else card
        (staged / "README.md").write_text(readme, encoding="utf-8")
        adapter = target / "adapter" if (staged / "adapter").is_dir() else None
        _publish(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return ExportReport(
        folder=target,
        adapter=adapter,
        tensors=len(state),
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        max_abs_diff=difference,
        logits=dict(probe.seen),
        note=note,
    )


def _prove_adapter(folder: Path, description: LanguageModel, probe: Probe) -> str:
    """Load the adapter as a user does, over its base, and compare its logits. The merged model is proven by itself: a
    base that is gone, or was changed since, costs its comparison, or the adapter's folder, and nothing else.

    Returns:
        What has to be known of the adapter, in words; empty where it stands on the files of its base.

    Raises:
        StorageError: over the base that it was trained on the adapter says something else than the policy.
    """
    from peft import PeftModel

    name = description.name
    try:
        base = probe.load_base()
        loaded_with = _unlike_its_files(base.config, description)
        rows = 0 if description.quantization is not None else probe.give_rows(base)  # 4-bit weights have other shapes
    except (LitRLError, OSError) as error:
        return f"adapter/ was not compared over its base, which cannot be loaded: {' '.join(str(error).split())}"
    changed = probe.changed_in(base)
    try:
        probe.look("The adapter over its base", PeftModel.from_pretrained(base, str(folder)))
    except (StorageError, RuntimeError, ValueError, IndexError):
        if not changed or description.quantization is not None:
            raise
        shutil.rmtree(folder)
        return (
            f"adapter/ is left out, as {name} is not the base that the adapter was trained on ({changed} differs): the "
            "merged model here is what was trained"
        )
    only = [f"as it was loaded here, with {loaded_with}"] if loaded_with else []
    only += [f"after resize_token_embeddings({rows})"] if rows else []
    untrained = ": new rows that it did not train are in the merged model alone" if rows else ""
    return f"adapter/ stands on {name} only {', and '.join(only)}{untrained}" if only else ""


def _unlike_its_files(config: Any, description: LanguageModel) -> str:
    """Return the settings of a loaded base that its files do not have: those of the user, and the size of its
    vocabulary."""
    from transformers import AutoConfig

    files = AutoConfig.from_pretrained(
        description.path,
        revision=description.revision,
        trust_remote_code=description.trust_remote_code,
        local_files_only=True,
    )
    missing, differing = object(), []
    for key in (*description.init_kwargs, "tie_word_embeddings", "vocab_size"):
        now, there = (getattr(each.get_text_config(), key, getattr(each, key, missing)) for each in (config, files))
        if now is not missing and now != there:
            differing.append(f"{key}={now!r}")
    return ", ".join(differing)


def unpublished(target: Path) -> list[Path]:
    """Return the folders that killed processes left beside a folder. An earlier export that had been moved aside is put
    back.

    Args:
        target: The folder of the export; it need not be there.
    """
    for earlier in sorted(target.parent.glob(f".{target.name}{_REPLACED}[0-9]*")):
        if not target.exists():
            os.rename(earlier, target)
    return [path for kind in (_STAGED, _REPLACED) for path in target.parent.glob(f".{target.name}{kind}[0-9]*")]


def _check_target(target: Path, description: LanguageModel) -> None:
    if description.is_local and target == Path(description.path).resolve():
        raise StorageError(f"The export would overwrite the model that training started from, {target}.")
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").is_file()):
        raise StorageError(f"{target} exists and is not an earlier export. Choose a new folder.")


def _write(staged: Path, rebuilt: Any, description: LanguageModel) -> PreTrainedModel:
    """Write everything but the card. Returns the plain model that was written, adapters merged."""
    from peft import PeftModel

    model = rebuilt
    if isinstance(rebuilt, PeftModel):
        adapter = rebuilt.peft_config[str(rebuilt.active_adapter)]
        local = description.name in SHIPPED or Path(description.name).is_dir()
        adapter.base_model_name_or_path = str(Path(description.path).resolve()) if local else description.name
        sort_names(adapter)
        # "auto", the default, would ask the hub whether the vocabulary was resized.
        rebuilt.save_pretrained(str(staged / "adapter"), save_embedding_layers=False)
        if (named := staged / "adapter" / str(rebuilt.active_adapter)).is_dir():  # of any name but "default"
            for file in named.iterdir():
                file.replace(staged / "adapter" / file.name)
            named.rmdir()
        verify_adapter(staged / "adapter", rebuilt)
        try:
            # Safe: it checks for NaN, and replaces the base's tensors, which the caller's state still points to.
            model = rebuilt.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise StorageError(f"The adapter cannot be merged: {error}") from error
    model.save_pretrained(staged)
    description.tokenizer.save_pretrained(staged)
    if description.processor is not None:
        description.processor.processor.save_pretrained(staged)
    _name_tokenizer_as_the_base(staged / "tokenizer_config.json", description)
    return model


def _name_tokenizer_as_the_base(file: Path, description: LanguageModel) -> None:
    """Write the tokenizer class that the base names: transformers writes the one that it took for it, which other
    versions, and engines, may not know. Its notes of how the base was loaded are left out."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    config = json.loads(file.read_text(encoding="utf-8"))
    home = description.tokenizer.name_or_path
    with contextlib.suppress(OSError, ValueError):  # of an object that has no files
        base = get_tokenizer_config(home, revision=description.revision, local_files_only=True) if home else {}
        config = {name: value for name, value in config.items() if name in base or name not in _OF_LOADING}
        config |= {"tokenizer_class": base["tokenizer_class"]} if base.get("tokenizer_class") else {}
    file.write_text(f"{json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)}\n", encoding="utf-8")


_OF_LOADING = ("is_local", "local_files_only")


def _publish(staged: Path, target: Path) -> None:
    """Make the staged folder durable, and put it in place of an earlier export."""
    flush_tree(staged)
    earlier = staged.with_name(staged.name.replace(_STAGED, _REPLACED))
    replaces = target.exists()
    if replaces:
        os.rename(target, earlier)
    try:
        os.rename(staged, target)
    except OSError:
        if replaces:
            os.rename(earlier, target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)
