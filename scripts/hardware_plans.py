"""The computed plans of docs/hardware.md: what the main command is cut into on GPUs that nobody here has.

python scripts/hardware_plans.py           # writes the tables into docs/hardware.md
python scripts/hardware_plans.py --check   # leaves with 1 where the page has another one
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config

from lit_rl.algorithms.checks.memory import Memory, RowLengths
from lit_rl.algorithms.checks.micro_batching import StepRows, fewest_micro_batches, memory_budget
from lit_rl.algorithms.checks.model_sizes import (
    gathered_weights,
    masters_at_once,
    number_sizes,
    policy_network,
    stored_bytes,
)
from lit_rl.algorithms.optim.optimizers import AdamW
from lit_rl.core.errors import ConfigError, format_bytes
from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.model_costs import ModelShape
from lit_rl.ops.fused_head import part_numbers
from lit_rl.ops.logprobs import block_numbers
from lit_rl.ops.sampling_distribution import NO_TRUNCATION

GPU = torch.device("cuda")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hardware.md"
BEGIN, END = "<!-- computed by scripts/hardware_plans.py{} -->\n", "<!-- end -->"

SHAPES = {
    "qwen0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen2.5-7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
"""Width, MLP, layers, heads, heads of keys, vocabulary, tied head: from the public config.json of each Qwen2.5."""

WHOLE, ADAPTERS = (0, "bf16-true"), [(16, "bf16-true"), (16, "bf16-mixed")]
RUNS = [(name, *how) for name in ("qwen0.5b", "qwen1.5b") for how in (WHOLE, *ADAPTERS)]
RUNS += [("Qwen2.5-7B", *how) for how in ADAPTERS]
"""Model, rank of the adapters (0: none), `trainer.precision`."""
RANKS = (2, 8, 16)
"""GPUs over which FSDP2 spreads a run."""
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 512, 512
"""`data.prompts_per_rollout`, `algo.group_size`, `data.max_prompt_tokens`, `sampling.max_new_tokens`: the defaults."""


def shape_of(name: str) -> ModelShape:
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    return ModelShape.of(config)


def memory(name: str, rank: int, precision: str) -> Memory:
    """Of `algo=grpo`, with `model.lora.r=RANK` if that is not 0; with `bf16-mixed` the frozen base is bfloat16 too."""
    held = LanguageModel(dtype="bfloat16", lora=Lora(r=rank)) if rank else LanguageModel()  # its own sizes are not read
    numbers = number_sizes(held, precision, AdamW())
    policy = policy_network(held, shape_of(name), numbers, "fused")
    lengths = RowLengths(PROMPT_TOKENS, NEW_TOKENS, GROUP, shares=True)
    blocks = {"block": block_numbers(GPU, NO_TRUNCATION), "part": part_numbers(GPU)}
    blocks["masters"] = masters_at_once([policy], numbers, AdamW())
    return Memory(policy, numbers, lengths, decoding=lengths, **blocks, may_recompute=True, may_offload=True)


def spread(name: str, ranks: int) -> Memory:
    """What each rank of `algo=grpo strategy=fsdp trainer.precision=bf16-true` needs; FSDP2 shares no prompts."""
    alone, held = memory(name, *WHOLE), LanguageModel()
    numbers = number_sizes(held, WHOLE[1], AdamW(), shards=True)
    policy = policy_network(held, shape_of(name), numbers, "fused")
    lengths = replace(alone.lengths, shares=False)
    whole = gathered_weights(policy, numbers, None, reference=False, stored=stored_bytes(held, numbers))
    sizes = {"policy": policy, "numbers": numbers, "lengths": lengths, "decoding": lengths}
    return replace(alone, **sizes, masters=0, gathered=whole, spread_over=ranks, ranks=ranks)


def planned(needs: Memory, step: StepRows, room: int) -> str:
    """The columns of a run: how it is cut, or what its smallest micro-batch would take."""
    try:
        cut = fewest_micro_batches(step, needs, room)
    except ConfigError:
        least = needs.recomputing(offload=True).plan(1, 1, steps_in_parts=True).total
        return f"does not fit | | | one completion: {format_bytes(least)}"
    rows, decoded = step.cuts()[cut.micro_batches], min(cut.decoded or 0, step.sequences)
    sizes = needs.recomputing(cut.offload) if cut.recompute else needs
    recompute = "on the host" if cut.offload else "yes" if cut.recompute else "no"
    total = sizes.plan(rows, decoded, steps_in_parts=cut.micro_batches > 1).total
    return f"{rows} of {step.units * step.rows} | {recompute} | {decoded} | {format_bytes(total)}"


def step_of(ranks: int) -> StepRows:
    """The part of an optimizer step that each rank learns from."""
    return StepRows(PROMPTS // ranks, GROUP, PROMPTS * GROUP // ranks, slices=(1, 2, 4, 8))


COLUMNS = "completions a micro-batch | gradient checkpointing | decoded | a step needs |"


def one_gpu() -> str:
    """Markdown."""
    lines = [f"| GPU | model | trains | precision | {COLUMNS}", "|" + "---|" * 8]
    for gigabytes in (24, 80):
        for name, rank, precision in RUNS:
            trains = f"LoRA r={rank}" if rank else "all weights"
            plan = planned(
                memory(name, rank, precision), step_of(1), memory_budget(torch.device("cuda"), gigabytes=gigabytes)
            )
            lines.append(f"| {gigabytes} GiB | {name} | {trains} | {precision} | {plan} |")
    return "\n".join(lines) + "\n"


def several_gpus() -> str:
    """Markdown; what each rank needs."""
    lines = [f"| each GPU | model | ranks | {COLUMNS}", "|" + "---|" * 7]
    for gigabytes in (24, 80):
        for name in ("qwen0.5b", "Qwen2.5-7B"):
            for ranks in RANKS:
                plan = planned(
                    spread(name, ranks), step_of(ranks), memory_budget(torch.device("cuda"), gigabytes=gigabytes)
                )
                lines.append(f"| {gigabytes} GiB | {name} | {ranks} | {plan} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, which: str, table: str) -> str:
    """The page with this table in its place."""
    before, begin, rest = text.partition(BEGIN.format(which))
    return before + begin + table + END + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = PAGE.read_text()
    written = with_table(with_table(text, "", one_gpu()), ", of several GPUs", several_gpus())
    if args.check:
        return int(written != text)
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
