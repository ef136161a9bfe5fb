"""What a data module was given under a name of another library, and what it is called here."""

from __future__ import annotations

from collections.abc import Iterable

from lit_rl import keywords

_HERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("eval_dataset", "val_dataset", "test_dataset"), ("val",)),
    **dict.fromkeys(("train_dataset", "dataset"), ("rows",)),
    **dict.fromkeys(("data_path", "data_files", "dataset_name"), ("path",)),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "per_device_train_batch_size", "generation_batch_size"),
        ("prompts_per_rollout", "batch_size"),
    ),
    "prompts_per_rollout": ("batch_size",),
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size"), ("val_batch_size",)),
    **dict.fromkeys(("max_prompt_length", "max_length", "max_seq_length"), ("max_prompt_tokens", "max_length")),
    "max_completion_length": ("max_completion_tokens",),
    "shuffle_dataset": ("shuffle",),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), ("learn",)),
    "step_separator": ("separator",),
    "train_on_last_step_only": ("last_step_only",),
    "formatting_func": ("map_row",),
    "dataset_text_field": ("rename",),
    "test_size": ("val_fraction",),
}
"""Names of settings in other libraries, and candidates here: the first that the data module has is meant."""

_MODULE = "it belongs to the algorithm, such as lit_rl.GRPO(...)"
_ELSEWHERE = {
    **dict.fromkeys(("tokenizer", "processing_class"), "the data module takes the tokenizer of the algorithm's model"),
    **dict.fromkeys(("group_size", "num_generations"), f"{_MODULE}: group_size="),
    **dict.fromkeys(("reward", "reward_funcs"), f"{_MODULE}: reward="),
    **dict.fromkeys(("max_new_tokens", "temperature"), "it belongs to lit_rl.Sampling(...), which the algorithm takes"),
    "data_collator": "rows are padded here without one",
    "num_workers": "rows are read and tokenised once, before the first step",
}


def known_names(kind: type, given: Iterable[str], taken: type) -> None:
    """Refuse keywords that no constructor of a data module takes.

    Args:
        kind: The class of the data module.
        given: The names of the keywords that are handed on.
        taken: The class whose constructor gets them, and its parents'.

    Raises:
        ConfigError: names the first of them, and what it is called here or what is near.
    """
    keywords.refuse(kind, given, taken, _place)


def _place(name: str, known: set[str]) -> str:
    here = next((each for each in _HERE.get(name, ()) if each in known), None)
    return f"here it is {here}=" if here else _ELSEWHERE.get(name, "")
