"""Memory needs of a step, by part: functions of the sizes of a model, of rows and of number types.

With L layers of width d, queries q and keys k wide (heads times their width), MLP of width m, vocabulary v; b rows of
s tokens; and bytes of a number w (weights), x (the residual stream), y (what matrix products read and write):

    weights         w N                       N parameters; a frozen base, the reference and the critic likewise
    gradients       4 N', optimizer 8 N'      N' that are trained; AdamW's two moments (1711.05101) in float32. Beside
                    narrow weights 2 N' more, the remainders of their float32 masters (optim.split_adamw)
    buckets         w N'                      DDP's, which hold what is sent between ranks, also where nothing is sent.
                    With `gradient_as_bucket_view` the gradients of a step with one micro-batch lie in them
    activations     what the backward pass of a layer reads, a token:
                      2 (x d + x d)           input of each norm, and the normed input where its weight is trained
                      y d c                   output of each norm, c = 2; under autocast for each product anew, 5
                      y (2 q + 2 k') + 4 h    queries, attention's output, keys and values, log-sum-exp of h heads
                      4 y m                   gate, silu(gate), up, their product
                      y r a                   adapters of rank r on a linear layers. Beside narrow weights without
                                              autocast they keep a float32 copy of what they read, in place of the
                                              norms' outputs and the MLP's product
                    and y s s' a row: the mask of its attention. `scaled_dot_product_attention` makes numbers of a mask
                    of bits anew in every layer and keeps them; under a mask keys are repeated for their heads: k' = q
                    with `attn_implementation=eager` instead of the mask h s s' (4 + y) a row: the softmax in float32,
                    and narrow where y < 4. Folded attention (lit_rl.ops.folded_attention) repeats nothing and keeps
                    no mask, but weights y h s s' a row of few tokens
    shards          FSDP2 spreads weights, gradients and optimizer over the ranks; whole on each are, in the type g that
                    computes: embedding and head of every model, which stay from their first use on; two layers, one
                    that computes and one on its way; all of a policy that decodes. A gradient is there whole, of g and
                    again of 4 bytes, before it is spread: of the embedding and the head, or of a layer
    logits          none; the hidden states that they are made of, and their gradient
    working memory  the larger of: a block of logits and what is made of a part of it (lit_rl.ops.fused_head), all
                    logits in place of the block in a pass with few;
                    gradients of one layer's activations, 4 y m + 3 x d a token. And those of the head's weight, x v d.
                    A critic of its own runs after the policy's head and back before it: its activations are there
                    beside the kept logits, and not beside the head's other blocks; so are texts that are learned
                    beside the rows. Rows of like length run in several
                    passes, of which each may keep its logits; they are counted as one.
                    Where that is more: 4 bytes of each master that the optimizer's step makes at a time, when
                    activations are gone
    allocator       a share of what comes and goes: holes between tensors
    images          pixels, what is kept of the parts that see, and the working memory of one of their layers, where
                    that is more: see lit_rl.algorithms.checks.model_sizes
    cache           2 y k L a token: prompts once a group, completions to their longest. Beside it, under autocast, the
                    narrow copies of weights that the products of a rollout read

Under gradient checkpointing (1604.06174) a layer keeps its input alone, on the host where it is offloaded (but for the
two on their way), and one layer at a time all of it. Lightning frees the gradients of a step after the forward pass of
the next one, so they are there whenever anything else is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lit_rl.models.frozen_teacher import LOGITS_PER_BLOCK
from lit_rl.models.model_costs import ModelShape
from lit_rl.models.shared_prefix import WORTH
from lit_rl.ops.folded_attention import is_worth, keeps_weights
from lit_rl.ops.fused_head import COLUMNS, KEPT

GIB = 2**30


LOGITS_OF_A_STEP = 4
"""Tensors of the size of a decode step's logits that exist at a time."""

WHOLE = 5
"""Tensors of the size of whole logits, in float32, where no head is fused: scaled, their log-softmax, its
exponentials, the gradients of two of them."""

REWARD_MODELS = "reward models"
"""The name of a run's reward models among the frozen models."""

TEACHERS_TOKENS = "tokens of the teacher"
"""The name of the columns of a rollout that hold a teacher's likeliest tokens."""

_NOT_SHARDED = ("engine", REWARD_MODELS, TEACHERS_TOKENS)
"""Parts that every rank holds whole."""

FRAGMENTATION = 0.1
"""Fragmentation: unusable memory of the allocator, as a share of temporary tensors. What glibc holds beyond it is left
free by `lit_rl.algorithms.checks.micro_batching`."""


@dataclass(frozen=True)
class NumberSizes:
    """Bytes of a number of each kind, by precision and optimizer."""

    weight: int = 4
    gradient: int = 4
    remainder: int = 0
    """Bytes that the optimizer keeps beside a narrow weight to form its float32 master."""
    moments: int = 8
    residual: int = 4
    product: int = 4
    copies: int = 2
    """Kept copies of the outputs of a layer's two norms: autocast narrows them for each product anew."""
    cast: int = 0
    """Bytes of the narrow copy of a weight that autocast makes."""

    @classmethod
    def of(cls, precision: str, moments: int, *, shards: bool = False) -> NumberSizes:
        """Return the sizes for a `trainer.precision`, and an optimizer with `moments` bytes of state a parameter.

        Under `bf16-true` FSDP2's shards are float32: they are the masters of what is gathered.
        """
        if precision == "bf16-true" and shards:
            return cls(moments=moments, product=2)
        if precision in ("bf16-mixed", "16-mixed"):
            return cls(moments=moments, product=2, copies=5, cast=2)
        if precision in ("bf16-true", "16-true"):
            return cls(weight=2, remainder=2, moments=moments, product=2)
        return cls(moments=moments)


Head = Literal["fused", "compared", "logits", "none"]


@dataclass(frozen=True)
class VisionMemory:
    """The memory of a prompt's images: see `lit_rl.algorithms.checks.model_sizes`."""

    pixels: int
    """Bytes of their pixels, an input of each pass."""
    kept: int
    """Bytes of the vision parts' activations that the backward pass reads."""
    working: int
    """Bytes of working memory of a vision layer, before the text runs."""


@dataclass(frozen=True)
class Network:
    """A model that a step runs.

    Args:
        shape: Its sizes.
        trained: Parameters with gradients; all of its own where there are no adapters.
        weight_bytes: Bytes of all its weights; 0 where they are another network's.
        adapters: Rank times the number of adapted layers; 0 where all weights are trained.
        widened: Numbers a token, over all layers, that adapters read in float32 beside the narrow ones of their layers.
        head: The head: fused with the softmax, with logits that are compared with another model's block by block, with
            plain logits, or none.
        logit: Bytes of a logit as the head computes it.
        checkpointing: Whether gradient checkpointing is on.
        offloaded: Whether the inputs of its layers are then kept on the host.
        narrow: Whether its weights are as narrow as autocast's products, so that none is copied.
        eager: Whether attention keeps the weights of all pairs of tokens.
        frozen: Frozen parts of a model over images.
        sight: Most memory of a prompt's images in it; None where it sees none.
    """

    shape: ModelShape
    trained: int
    weight_bytes: int
    adapters: int = 0
    widened: int = 0
    head: Head = "fused"
    logit: int = 4
    checkpointing: bool = False
    offloaded: bool = False
    narrow: bool = False
    eager: bool = False
    frozen: tuple[str, ...] = ()
    sight: VisionMemory | None = None

    @property
    def bytes_of_base(self) -> float:
        """Bytes of a base weight under adapters; without any, all weights are trained in float32 or bfloat16."""
        return (self.weight_bytes - (4 * self.trained if self.adapters else 0)) / self.shape.parameters


@dataclass(frozen=True)
class RowLengths:
    """The largest lengths of a row, in tokens.

    Args:
        prompt: Tokens of its prompt.
        response: Tokens that are scored.
        group: Rows with the same prompt.
        shares: Whether the prompt of a group may run once.
        folds: Whether its rows then attend to the prompt's keys in place (folded attention).
        texts: Texts of a row: two for a pair, the most branches of an episode.
    """

    prompt: int
    response: int
    group: int = 1
    shares: bool = False
    folds: bool = False
    texts: int = 1


@dataclass(frozen=True)
class ForwardCall:
    """A forward call: `rows` times `queries` tokens after `keys - queries` others, held once a group if folded."""

    rows: int
    queries: int
    keys: int
    folded: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part while the policy learns, and while it generates."""

    learning: Mapping[str, int]
    generating: Mapping[str, int]
    host: int = 0
    """Bytes in main memory instead of the device while the policy learns."""

    @property
    def total(self) -> int:
        """The larger need of the two phases, in bytes."""
        return max(sum(self.learning.values()), sum(self.generating.values()))


@dataclass(frozen=True)
class AuxiliaryTexts:
    """Auxiliary texts that are learned with the rows, and whose graph is alive with theirs.

    Args:
        texts: Texts of an optimizer step, over all ranks.
        rows: Rows of the same step, over all ranks.
        tokens: Most tokens of a text. All are scored.
        sight: Most memory of what a text shows; None where none shows anything.
    """

    texts: int
    rows: int
    tokens: int
    sight: VisionMemory | None = None

    def call(self, rows: int) -> ForwardCall:
        """Return the call of the texts that go with a number of rows."""
        return ForwardCall(-(-self.texts * rows // self.rows), self.tokens, self.tokens)


@dataclass(frozen=True)
class DDPBuckets:
    """DDP's buckets of gradients that are sent between ranks."""

    size: int
    """Bytes."""
    viewed: bool = False
    """True where gradients are views of them in a step with one micro-batch. With several, the sums are tensors of
    their own until the last."""


@dataclass(frozen=True)
class GatheredWeights:
    """Bytes that FSDP2 holds whole on every rank, beside the shards."""

    root: int
    """Bytes of the policy's embedding and head: they stay whole from their first use on."""
    layer: int
    """Bytes of one of its layers."""
    whole: int
    """Bytes of all of it, for decoding."""
    others: int = 0
    """Bytes of embeddings and heads of other models."""
    gradients: int = 0
    """Bytes of the largest unit's gradients, before they are sharded."""


@dataclass(frozen=True)
class Memory:
    """The memory needs of a run, as a function of its micro-batches.

    Args:
        policy: The trained policy.
        numbers: Sizes of numbers.
        lengths: Lengths of its rows.
        critic: A separate critic.
        others: Bytes by name of frozen weights, a reference, a reward model or a teacher, and of what it says.
        auxiliary: Auxiliary texts that the policy learns from.
        buckets: DDP's buckets of gradients; None without DDP.
        engine: Bytes of an engine that stays in memory while the policy learns.
        decoding: Lengths of a sequence, where this process generates with the policy's own weights.
        grouped_cache: Whether the cache holds a prompt's keys and values once a group.
        spread_over: Ranks over which weights, gradients and optimizer state are sharded.
        ranks: World size of the run, with or without sharding.
        gathered: Weights that are whole all the same; None where the strategy is not FSDP2.
        shards_on_host: Whether shards are in main memory, where the optimizer steps.
        masters: Bytes of float32 masters of narrow weights that exist at once in the optimizer's step.
        block: Logits in a block of the fused head.
        part: Logits of a block that are processed at a time.
        may_recompute: Whether the plan may choose gradient checkpointing.
        may_offload: Whether it may also keep the inputs of layers on the host.
        host: Bytes of main memory for them; None where that is not known.
        budget: Bytes of the device that a plan may use; None where that is not known.
    """

    policy: Network
    numbers: NumberSizes
    lengths: RowLengths
    critic: Network | None = None
    others: Mapping[str, int] = field(default_factory=dict)
    auxiliary: AuxiliaryTexts | None = None
    buckets: DDPBuckets | None = None
    engine: int = 0
    decoding: RowLengths | None = None
    grouped_cache: bool = True
    spread_over: int = 1
    ranks: int = 1
    gathered: GatheredWeights | None = None
    shards_on_host: bool = False
    masters: int = 0
    block: int = 2**22
    part: int = 2**18
    may_recompute: bool = False
    may_offload: bool = False
    host: int | None = None
    budget: int | None = None

    def recomputing(self, offload: bool = False) -> Memory:
        """Return the same needs under gradient checkpointing."""
        policy = replace(self.policy, checkpointing=True, offloaded=offload)
        critic = replace(self.critic, checkpointing=True, offloaded=offload) if self.critic else None
        return replace(self, policy=policy, critic=critic, may_recompute=False, may_offload=False)

    def cheaper_variants(self) -> Iterator[Memory]:
        """Yield itself, then the variants that need less memory, the fastest first."""
        yield self
        if self.may_recompute:
            yield self.recomputing()
        if self.may_offload:
            yield self.recomputing(offload=True)

    def plan(self, rows: int, decoded: int, *, steps_in_parts: bool) -> MemoryPlan:
        """Return the plan for micro-batches of `rows` rows, and `decoded` sequences a decode batch.

        Args:
            rows: Rows of a micro-batch.
            decoded: Sequences of a decode batch.
            steps_in_parts: Whether a step has several micro-batches, so that gradients are summed.
        """
        held, waiting = self.held(steps_in_parts), 0
        if self.shards_on_host:
            waiting = sum(size for name, size in held.items() if name not in _NOT_SHARDED)
            held = {name: size for name, size in held.items() if name in _NOT_SHARDED}
        learning = self._activations(rows) | self._working(rows, steps_in_parts)
        generating = self._decoding(self.decoding, decoded) if self.decoding else {}
        if (gathered := self.gathered) is not None:
            learning["gathered weights"] = gathered.root + gathered.others + 2 * gathered.layer  # one is prefetched
            learning["whole gradients"] = gathered.gradients
            if generating:
                generating["gathered weights"] = gathered.whole + gathered.others
        generating = held | _with_fragmentation(generating) if generating else {}
        return MemoryPlan(held | _with_fragmentation(learning), generating, waiting + self._offloaded_bytes(rows))

    def held(self, steps_in_parts: bool) -> dict[str, int]:
        """Return the parts that exist whatever is computed."""
        networks = [self.policy] + ([self.critic] if self.critic else [])
        trained, buckets = sum(network.trained for network in networks), self.buckets
        parts = {
            "weights": self.policy.weight_bytes,
            "gradients": self.numbers.gradient * trained,
            "buckets": 0 if buckets is None or (buckets.viewed and not steps_in_parts) else buckets.size,
            "optimizer": (self.numbers.moments + self.numbers.remainder) * trained,
            "critic": self.critic.weight_bytes if self.critic else 0,
            **self.others,
            "engine": self.engine,
        }
        return {name: size // (1 if name in _NOT_SHARDED else self.spread_over) for name, size in parts.items() if size}

    def _calls(self, network: Network, rows: int) -> list[ForwardCall]:
        """Return the calls of a network in the forward pass of a micro-batch."""
        texts = [self.auxiliary.call(rows)] if self.auxiliary is not None and network is self.policy else []
        return self._calls_of_rows(network, rows) + texts

    def _calls_of_rows(self, network: Network, rows: int) -> list[ForwardCall]:
        p, t, g = self.lengths.prompt, self.lengths.response, min(rows, self.lengths.group)
        runs_prompts_once = self.lengths.shares and network is self.policy and not network.checkpointing and t > 1
        prompts = -(-rows // g)
        if runs_prompts_once and (rows - prompts) * p >= WORTH * rows * (p + t):
            queries_per_key = network.shape.query_width / network.shape.kv_width
            folded = self.lengths.folds and not network.eager and is_worth(rows / prompts, queries_per_key, t, p)
            return [ForwardCall(prompts, p, p), ForwardCall(rows, t - 1, p + t - 1, folded)]
        return [ForwardCall(rows * self.lengths.texts, p + t, p + t)]

    def _activations(self, rows: int) -> dict[str, int]:
        """Return what the backward pass reads, for the policy and a critic that learns in the same step."""
        networks = list(filter(None, (self.policy, self.critic)))
        total = sum(self._activation_bytes(network, rows) for network in networks)
        parts = {"activations": total, "logits": self._logit_bytes(rows)}
        vision = [(network.sight, self._prompts_seen(network, rows)) for network in networks]
        if self.auxiliary is not None:
            vision += [(self.auxiliary.sight, self.auxiliary.call(rows).rows)]
        images = {
            "pixels": sum(prompts * sight.pixels for sight, prompts in vision if sight),
            "activations of images": sum(prompts * sight.kept for sight, prompts in vision if sight),
        }
        return parts | {name: size for name, size in images.items() if size}

    def _prompts_seen(self, network: Network, rows: int) -> int:
        """Return the number of prompts whose images a pass sees: one a row, or one a group where it runs once."""
        return self._calls_of_rows(network, rows)[0].rows

    def _activation_bytes(self, network: Network, rows: int) -> int:
        """Return the bytes of the activations of a network."""
        calls = self._calls(network, rows)
        copies = 1 if network.adapters == 0 else len(calls)  # autocast caches copies of trained weights
        if network.narrow or (network.adapters and network.checkpointing):
            copies = 0
        of_calls = sum(self._call_bytes(network, call) for call in calls)
        return of_calls + copies * self.numbers.cast * network.shape.multiplied

    def _call_bytes(self, network: Network, call: ForwardCall) -> int:
        shape, numbers = network.shape, self.numbers
        layer = self._layer_bytes(network, call)
        if not network.checkpointing:
            return shape.layers * layer
        inputs = 2 if network.offloaded else shape.layers
        return inputs * call.tokens * numbers.residual * shape.hidden + layer

    def _offloaded_bytes(self, rows: int) -> int:
        """Return the bytes of inputs of layers that are kept in main memory."""
        networks = [network for network in (self.policy, self.critic) if network is not None and network.offloaded]
        return self.numbers.residual * sum(
            network.shape.layers * network.shape.hidden * call.tokens
            for network in networks
            for call in self._calls(network, rows)
        )

    def _layer_bytes(self, network: Network, call: ForwardCall) -> int:
        shape, x, y = network.shape, self.numbers.residual, self.numbers.product
        # A frozen layer keeps no input, and adapters keep a wide copy of it, in place of a narrow one of norms' outputs
        # and the MLP's product.
        norms = 2 * x * (1 if network.adapters else 2) + (0 if network.widened else y * self.numbers.copies)
        mlp = (3 if network.widened else 4) * y * shape.inner
        per_token = shape.hidden * norms + mlp + y * (2 * shape.query_width + network.adapters // shape.layers)
        per_token += 4 * network.widened // shape.layers
        return call.tokens * per_token + call.rows * self._attention_bytes(network, call)

    def _attention_bytes(self, network: Network, call: ForwardCall) -> int:
        """Return the bytes of attention for a row."""
        shape, y = network.shape, self.numbers.product
        if call.folded:
            d = shape.query_width // shape.heads
            per_pair = y * shape.heads if keeps_weights(call.queries, d, d) else 0
            return per_pair * call.queries * call.keys + y * 2 * shape.kv_width * call.queries
        per_pair = shape.heads * (4 + (y if y < 4 else 0)) if network.eager else y
        repeated = y * 2 * shape.query_width * call.keys
        return per_pair * call.queries * call.keys + repeated + 4 * shape.heads * call.queries

    def _logit_bytes(self, rows: int) -> int:
        if self.policy.head == "none":
            return 0
        texts = self.auxiliary.call(rows).tokens if self.auxiliary is not None else 0
        shape, targets = self.policy.shape, rows * self.lengths.texts * self.lengths.response + texts
        hidden = targets * shape.hidden * (self.numbers.product + 4)
        whole = targets * shape.vocabulary
        if self.policy.head == "logits":
            return hidden + whole * (self.numbers.product + 4 * WHOLE)
        if self.policy.head == "compared":
            return hidden + 2 * min(whole, LOGITS_PER_BLOCK) * (self.numbers.product + 4 * WHOLE)
        return hidden

    def _working(self, rows: int, steps_in_parts: bool) -> dict[str, int]:
        """Return the working memory: of the head, or of gradients in the layer whose backward pass needs most."""
        head, head_bytes, logits = self.policy.head, 0, 0
        if head == "fused":
            tokens = rows * self.lengths.texts * self.lengths.response
            head_bytes, logits = self._head_bytes(tokens), self._kept_logit_bytes(tokens)
        layer_bytes = max(self._layer_gradients(network, rows) for network in filter(None, (self.policy, self.critic)))
        if self.critic is not None:  # it runs after the policy's head, and back before it
            head_bytes -= self._activation_bytes(self.critic, rows)
        if self.auxiliary is not None and head == "fused":  # these run after both
            head_bytes = max(head_bytes, logits + self._head_bytes(self.auxiliary.call(rows).tokens))
        if self.critic is not None or self.auxiliary is not None:
            layer_bytes += logits
        vision_bytes = max(self._vision_working(network, rows) for network in filter(None, (self.policy, self.critic)))
        if self.auxiliary is not None and (sight := self.auxiliary.sight) is not None:  # before their own activations
            call = self.auxiliary.call(rows)
            vision_bytes = max(vision_bytes, call.rows * sight.working - self._call_bytes(self.policy, call))
        most = max(layer_bytes, head_bytes, vision_bytes, self._second_gradients(rows) if steps_in_parts else 0)
        sums_head_gradient = self.policy.adapters == 0 and head != "none" and steps_in_parts
        learning = most + (4 * self.policy.shape.head if sums_head_gradient else 0)
        return {"working memory": max(learning, self.masters - sum(self._activations(rows).values()))}

    def _second_gradients(self, rows: int) -> int:
        """Return the bytes of gradients of a micro-batch's later calls, beyond the activations freed by then.

        Autograd sums the contributions of all calls of a graph to a weight, and adds that to the sum of earlier
        micro-batches when the backward pass of the first call, which is the last, ends: until then there is a second
        set of gradients.
        """
        _, *later = self._calls(self.policy, rows)
        through = sum(self._call_bytes(self.policy, call) for call in later)
        return max(0, self.numbers.gradient * self.policy.trained - through) if later else 0

    def _layer_gradients(self, network: Network, rows: int) -> int:
        """Return the bytes of the gradients of a layer's activations."""
        per_token = 4 * self.numbers.product * network.shape.inner + 3 * self.numbers.residual * network.shape.hidden
        return max(call.tokens for call in self._calls(network, rows)) * per_token

    def _vision_working(self, network: Network, rows: int) -> int:
        """Return the working memory of a vision layer, beyond the activations of the text, which come after it."""
        if network.sight is None:
            return 0
        return max(0, self._prompts_seen(network, rows) * network.sight.working - self._activation_bytes(network, rows))

    def _kept_logit_bytes(self, tokens: int) -> int:
        """Return the bytes of the logits that a fused head keeps for a number of tokens; 0 where it keeps none."""
        whole = tokens * self.policy.shape.vocabulary * self.policy.logit
        return whole if whole <= KEPT else 0

    def _head_bytes(self, tokens: int) -> int:
        """Return the peak of a fused head: a block of logits, or all that are kept, and copies of a part."""
        columns = min(COLUMNS, self.policy.shape.vocabulary)
        rows = max(1, min(tokens, self.block // columns))
        kept, part = self._kept_logit_bytes(tokens), min(rows, max(1, self.part // columns)) * columns
        # Its exponentials; and a float32 copy, where it cannot be overwritten.
        copies = 2 if kept or self.policy.logit < 4 else 1
        return (kept or self.policy.logit * rows * columns) + 4 * copies * part

    def _decoding(self, lengths: RowLengths, rows: int) -> dict[str, int]:
        """Return the memory of a decode batch: keys and values, and the logits of a step with their copies."""
        shape, p, t = self.policy.shape, lengths.prompt, lengths.response
        # The last row of a group keeps its prompt: `generation.native` holds no more than twice those of full batches.
        prompts = min(rows, 2 * -(-rows // lengths.group)) if self.grouped_cache else rows
        per_token = 2 * self.numbers.product * shape.kv_width * shape.layers
        logits = 4 * LOGITS_OF_A_STEP * rows * shape.vocabulary
        prefill = 3 * self.numbers.product * shape.inner * -(-rows // lengths.group) * p
        narrow = 0 if self.policy.narrow else self.numbers.cast * shape.multiplied
        parts = {"key-value cache": per_token * (prompts * p + rows * t), "narrow weights": narrow, "logits": logits}
        if (sight := self.policy.sight) is not None:
            seen = -(-rows // lengths.group)
            parts["pixels"], prefill = seen * sight.pixels, max(prefill, seen * sight.working)
        return {name: size for name, size in parts.items() if size} | {"working memory": prefill}


def _with_fragmentation(parts: dict[str, int]) -> dict[str, int]:
    """Return temporary parts with the allocator's fragmentation."""
    return parts | {"allocator": int(FRAGMENTATION * sum(parts.values()))}
