"""A reference with weights of its own: another model, or another adapter, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lit_rl.errors import ConfigError, LitRLError
from lit_rl.models.policy import hub
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.loading import (
    Float32Head,
    RulingHead,
    check_causal,
    continue_adapter,
    rule_out_placeholders,
    use_float32_head,
)
from lit_rl.models.policy.tokenizer import load_tokenizer
from lit_rl.models.policy.trunk import without_adapters
from lit_rl.models.reference.base import Fixed, Held, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OtherModel(Held, Fixed):
    """Other weights than the policy's, frozen, in the policy's type: a model, an adapter on it, or an adapter alone.

    An adapter alone stands on the policy's own base, whose frozen weights are shared. A model must have the policy's
    vocabulary: the KL compares the two token by token. The KL at step 0 is 0 only if these are the policy's weights.

    Args:
        name: The model: "tiny", a folder, or a hub id; null takes the policy's own base.
        adapter: A PEFT LoRA adapter to put on it: a folder or a hub id.
        revision: Branch, tag or commit of the model's hub repository.
        trust_remote_code: Run Python code that comes with the model, from the hub only with ``revision`` a commit.
        device: "cpu" keeps it on the CPU; null places it like the policy.

    Raises:
        ConfigError: neither ``name`` nor ``adapter`` is given, one of them is no name, or they do not fit together.
    """

    def __init__(
        self,
        name: str | None = None,
        adapter: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        device: Literal["cpu"] | None = None,
    ) -> None:
        super().__init__(device)
        if name is None and adapter is None:
            raise ConfigError(
                "reference=path needs reference.name (a folder or hub id of a model), reference.adapter (of an "
                "adapter), or both. For the policy as it begins, use reference=frozen_copy."
            )
        if name is None and (revision is not None or trust_remote_code):
            raise ConfigError(
                "reference.revision and reference.trust_remote_code are those of reference.name, which is null: set "
                "it, or leave them out."
            )
        self.adapter = adapter
        if adapter is not None:
            hub.resolve("reference.adapter", adapter)
        self._settings: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        with _keys_of_the_reference():
            self.model = None if name is None else LanguageModel(name, **self._settings)

    def module(self, policy: nn.Module) -> Scorer:
        """Load the module. Raise ConfigError for another vocabulary, and what loading a model raises."""
        found: Any = policy
        with _keys_of_the_reference():
            base = self._own_base(found) if self.model is None else self._load(self.model, found)
            model = base if self.adapter is None else continue_adapter(base, self.adapter)
        return self.hold(model)

    def _load(self, model: LanguageModel, policy: Any) -> PreTrainedModel:
        check_causal(model.name, model.config)
        self._check_vocabulary(model, policy)
        alike = LanguageModel(
            model.name,
            dtype=str(policy.dtype).removeprefix("torch."),
            attn_implementation=policy.config._attn_implementation,
            **self._settings,
        )
        base = alike.load_base()
        head = policy.get_output_embeddings()
        if isinstance(head, Float32Head) or (isinstance(head, RulingHead) and head.exact):
            use_float32_head(base)
        if isinstance(head, RulingHead):
            rule_out_placeholders(base)
        return base

    def _own_base(self, policy: Any) -> PreTrainedModel:
        """Return the policy without its adapters: as it was loaded, where it has none."""
        from peft import PeftModel

        copied: Any = self.copied(policy)
        return without_adapters(copied) if isinstance(copied, PeftModel) else copied

    def _check_vocabulary(self, model: LanguageModel, policy: Any) -> None:
        """Compare the rows of the embeddings, which any model has, and the tokens where the policy has a folder."""
        rows, needed = (config.get_text_config().vocab_size for config in (model.config, policy.config))
        if rows != needed:
            raise _other_vocabulary(model.name, f"its embedding has {rows} rows, the policy's {needed}")
        if not policy.name_or_path:
            return
        theirs = load_tokenizer(model.name, model.path, **self._settings).get_vocab()
        ours = load_tokenizer(policy.name_or_path, policy.name_or_path, **_as_loaded(policy)).get_vocab()
        different = sorted(
            token for token in theirs.keys() | ours.keys() if theirs.get(token, -1) != ours.get(token, -1)
        )
        if different:
            raise _other_vocabulary(
                model.name,
                f"its tokenizer has {len(theirs)} tokens, the policy's {len(ours)}, and {len(different)} of them are "
                f"not the same token under the same id ({', '.join(map(repr, different[:3]))})",
            )


def _as_loaded(policy: Any) -> dict[str, Any]:
    """Return the hub settings that the policy was read with: the reference does not decide what it may run."""
    commit = getattr(policy.config, "_commit_hash", None)  # None for a folder
    return {"revision": commit, "trust_remote_code": type(policy.config).__module__.startswith("transformers_modules")}


def _other_vocabulary(name: str, how: str) -> ConfigError:
    return ConfigError(
        f"reference.name={name!r} has another vocabulary than the policy: {how}. The KL compares the two token by "
        "token, so the reference must be of the policy's own family. A model of another one can be a reward model, "
        "which reads text."
    )


@contextmanager
def _keys_of_the_reference() -> Iterator[None]:
    """Rewrite the policy's keys in the loader's errors as the reference's."""
    try:
        yield
    except LitRLError as error:
        message = re.sub(r"\bmodel\.(name|adapter|revision|trust_remote_code)\b", r"reference.\1", str(error))
        raise type(error)(message) from error
