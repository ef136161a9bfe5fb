"""The memory of an optimizer step: planned, peak, and the error where it ran out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from lit_rl.algorithms.checks.memory import Memory, MemoryPlan
from lit_rl.algorithms.checks.micro_batching import remedies
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.rollouts.phase_costs import on_gpu, process_peak
from lit_rl.core.errors import BackendError, format_bytes, is_out_of_memory
from lit_rl.generation.generator import DecodingMemoryError

_LEARNING_PARTS = ("gradients", "buckets", "optimizer")
"""Parts of a plan that exist only during learning."""


def planned_memory(module: PolicyModule) -> MemoryPlan | None:
    """Return bytes by part; None where model or rows are not known. Called once the module is set up."""
    memory, step = module.memory(), module.micro_batches.step
    if memory is None or step is None:
        return None
    count, decoded = module.trainer.accumulate_grad_batches, module.micro_batches.decoded_at_once
    return memory.plan(step.units * step.rows // count, decoded, steps_in_parts=count > 1)


def peak_memory() -> dict[str, int]:
    """Return the peak bytes of this process: `process` of the machine's memory; and where it used a GPU, `tensors`
    there, and `reserved`, with PyTorch's cache. Empty where the system does not count."""
    found = {"process": size} if (size := process_peak()) else {}
    if on_gpu():
        found |= {"tensors": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


@contextmanager
def explain_out_of_memory(module: PolicyModule) -> Iterator[None]:
    """Add the plan, and the settings that lower it, to the error where memory runs out in this block.

    Raises:
        BackendError: for an error that satisfies `lit_rl.core.errors.is_out_of_memory`.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = module.trainer_or_none is not None and module.trainer.state.fn == "fit"
        explained = None
        if isinstance(error, DecodingMemoryError):
            explained = _decoding_error(error, module, fits)
        elif module.trainer_or_none is not None and not fits:
            explained = _scoring_error(error, module)
        if explained is None and fits:
            explained = _learning_error(error, module)
        if explained is None:  # nothing is known of the model
            raise
        raise explained from error


def _decoding_error(error: DecodingMemoryError, module: PolicyModule, fits: bool) -> BackendError | None:
    """Return the error of a decoding that ran out of memory; None where nothing is known of the model."""
    memory, at_once = module.memory(), error.at_once
    if memory is None:
        return None
    parts = memory.plan(1, at_once, steps_in_parts=True).generating
    parts = {name: size for name, size in parts.items() if size and (fits or name not in _LEARNING_PARTS)}
    if not parts:
        return None
    fewer = f"generator.batch_size={at_once // 2} (it was {at_once}; samples do not depend on it); " * (at_once > 1)
    return BackendError(
        f"Memory ran out while completions were decoded, {at_once} at once: {_first_words(error)}. Planned were "
        f"{_list_parts(parts, memory)}; other processes may have taken the rest. Set one of: {fewer}"
        "shorter texts (sampling.max_new_tokens, data.max_prompt_tokens); a smaller model."
    )


def _scoring_error(error: Exception, module: PolicyModule) -> BackendError | None:
    """Return the error of a validation: a plan has the models, and not the memory that scoring its rows takes."""
    memory, rows = module.memory(), getattr(getattr(module.trainer, "datamodule", None), "val_batch_size", None)
    if memory is None or rows is None:
        return None
    parts = {name: size for name, size in memory.held(True).items() if size and name not in _LEARNING_PARTS}
    fewer = f"data.val_batch_size={rows // 2} (it was {rows}); " * (rows > 1)
    return BackendError(
        f"Memory ran out while rows were scored, {rows} a batch: {_first_words(error)}. Models take "
        f"{_list_parts(parts, memory)}; the rows, or other processes, have taken the rest. Set one of: {fewer}"
        "shorter texts (sampling.max_new_tokens, data.max_prompt_tokens, data.max_length); a smaller model."
    )


def _list_parts(parts: Mapping[str, int], memory: Memory) -> str:
    """Return the sum of the parts, the memory there was, and each part."""
    had = "" if memory.budget is None else f" of {format_bytes(memory.budget)}"
    listed = ", ".join(f"{n} {format_bytes(size)}" for n, size in parts.items())
    return f"{format_bytes(sum(parts.values()))}{had} ({listed})"


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _learning_error(error: BaseException, module: PolicyModule) -> BackendError:
    """Return the error with the plan, and the settings that lower it.

    Args:
        error: One that satisfies `lit_rl.core.errors.is_out_of_memory`.
        module: That was trained.
    """
    first = _first_words(error)
    sizes, memory, step = planned_memory(module), module.memory(), module.micro_batches.step
    if sizes is None or memory is None or step is None:
        return BackendError(
            f"Memory ran out: {first}. Set algo.micro_batch_size lower, shorten the texts "
            "(sampling.max_new_tokens, data.max_prompt_tokens, data.max_length), or take a smaller model."
        )
    worst = max((sizes.learning, sizes.generating), key=lambda parts: sum(parts.values()))
    micro_batches = module.trainer.accumulate_grad_batches
    rows = step.units * step.rows // micro_batches
    smaller = [below for below in sorted(step.cuts().values(), reverse=True) if below < rows]
    ways = [f"algo.micro_batch_size={smaller[0]} (it was {rows})"] if smaller else []
    if smaller and module.micro_batches.accumulation(module.trainer) > 1:
        count = step.units * step.rows // smaller[0]
        ways = [f"trainer.accumulate_grad_batches={count} (it was {micro_batches})"]
    worst = {name: size for name, size in worst.items() if size}
    return BackendError(
        f"Memory ran out: {first}. Planned were {_list_parts(worst, memory)}; other processes may have taken the "
        "rest. Set "
        f"one of: {'; '.join([*ways, *remedies(worst, memory, step)])}; or plan for less with plan.memory_gb."
    )
