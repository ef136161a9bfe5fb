"""Settings of the algorithms: the keywords of `GRPO(...)`, `DPO(...)` and the others, and the keys of `algo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, AtLeastZero, NotNegative, Portion, Positive
from lit_rl.settings.base import REQUIRED, Settings, imported

if TYPE_CHECKING:
    from lit_rl.algorithms.evaluation.validation import Evaluation
    from lit_rl.algorithms.optim.optimizers import OptimizerFactory
    from lit_rl.algorithms.optim.schedules import ScheduleLike
    from lit_rl.algorithms.terms.credit import RunningNorm
    from lit_rl.algorithms.terms.groups import GroupReplay, GroupSelection
    from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, AdaptiveKL, FixedEntropy, FixedKL, KLControl
    from lit_rl.algorithms.terms.teachers import DistillationForm, RolloutTeacher
    from lit_rl.algorithms.terms.verdict_terms import DensityRatio
    from lit_rl.core.rollout import Sampling
    from lit_rl.data.supervised_text import SupervisedText
    from lit_rl.environments.environment_base import Interactive
    from lit_rl.generation.generator import Generator
    from lit_rl.models.critics import Critic
    from lit_rl.models.language_model import LanguageModel
    from lit_rl.models.loaded_model import ModelLike, TokenizerLike
    from lit_rl.models.references import Reference
    from lit_rl.rewards.judges import Judge
    from lit_rl.rewards.weighted_rewards import Rewards


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Settings):
    """Settings of every algorithm."""

    key = "algo"

    model: ModelLike = field(default=REQUIRED, kw_only=False)
    """The policy: a description, or its name, folder or hub id. In Python also a model of transformers or PEFT
    that is already loaded: it is trained in place."""
    tokenizer: TokenizerLike = None
    """The tokenizer of a model that is already loaded; of one over images its processor."""
    reference: Reference | None = None
    """The model against which the KL is measured, loaded only if a term needs it. None chooses by the policy."""
    optimizer: OptimizerFactory | None = None
    """Factory of the optimizer. None is AdamW at a learning rate of 1e-6."""
    scheduler: ScheduleLike | None = None
    """The learning-rate schedule, or a function from an optimizer to a scheduler of torch, which steps once an
    optimizer step. None is linear to zero."""
    seed: int = 0
    """Seed of the samples and of the order of groups."""
    micro_batch_size: AtLeastOne | Literal["auto"] | None = None
    """Rows of a forward pass on each rank, instead of `trainer.accumulate_grad_batches`: completions of whole
    groups or their slices, or rows of a data set. "auto" takes as many as fit into memory; None leaves it to
    the Trainer."""


@dataclass(frozen=True, kw_only=True)
class GeneratingConfig(PolicyConfig):
    """Settings of methods that train a policy: a generator and rewards."""

    reward: Rewards | Callable = field(default=REQUIRED, kw_only=False)
    """Reward functions and weights, or one function."""
    generator: Generator | None = None
    """The generator of completions. None is the in-process decode loop."""
    sampling: Sampling = imported("lit_rl.algorithms.loop.generating.DEFAULT_SAMPLING")
    """Sampling settings of training completions. By default completions have at most 512 tokens, or as many as
    the model's context leaves after the longest prompt."""
    evaluation: Evaluation = imported("lit_rl.algorithms.loop.generating.DEFAULT_EVALUATION")
    """Settings of validation."""
    judge: Judge | Callable[..., Any] | None = None
    """Judge of which of two completions is better: a judge of `lit_rl.rewards`, or a function. None compares
    the summed rewards. Used by `eval.win_rate_against`."""
    log_entropy: bool = True
    """Log the mean entropy of the policy at the learned tokens. Computing it takes a few percent of the head's
    time; if a term reads entropies, they are computed and logged anyway."""


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(GeneratingConfig):
    """Settings of methods that learn from the completions of the policy."""

    group_size: AtLeastOne = 8
    """Completions a prompt; 2 or more if the advantage compares completions of one prompt."""
    minibatches: AtLeastOne = 1
    """Optimizer steps per pass over a rollout."""
    iterations: AtLeastOne = 1
    """Passes over a rollout."""
    split_groups: AtLeastOne | Literal["auto"] = "auto"
    """Slices of every group, if a whole group is too large for a micro-batch. "auto" splits groups if
    `micro_batch_size` or the memory plan requires it."""
    groups: GroupSelection | None = None
    """Selection of the groups, or members of groups, to learn from. None: all."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(OnPolicyConfig):
    """Settings of policy-gradient methods: the terms of the objective."""

    advantage: Callable = REQUIRED
    """`(rewards (n,), group_id (n,), ...) -> (n,) or (n, t)`; it may also name `values`, `weights`, `lengths`,
    `greedy_rewards`, `gradient_norms`, `token_rewards`, `mask`, `step_ends`, `turn`, `state`, `role`. An object
    with `state` and `load_state` is restored on resuming."""
    role: str | None = None
    """Column of the data, or of episodes, that names the role in which a completion was written. Completions of
    a prompt are then compared with those of their role only, and behind a colon stands what they are compared within:
    `solver:p7` has the role `solver`. None: no roles."""
    loss: Callable = imported("lit_rl.ops.policy_losses.clipped_policy_loss")
    """`(logprobs, old_logprobs, advantages, mask) -> ((b, t), metrics)`: the loss of each token; it may also name
    `weights`, `step` and `group_id`, which keeps the completions of a prompt in one micro-batch."""
    kl: Callable = imported("lit_rl.ops.kl.corrected_k3")
    """`(logprobs, ref_logprobs, old_logprobs) -> (b, t)`: the estimator of the KL in the loss."""
    reduction: Callable = imported("lit_rl.ops.reductions.token_mean")
    """`(per_token, mask, totals) -> scalar`: the average of the loss over tokens and sequences."""
    correction: Callable | None = imported("lit_rl.ops.engine_mismatch.auto_correction")
    """`(old_logprobs, sampler_logprobs, mask) -> (b, t)`: importance weights for an engine that samples from a
    slightly different policy. `auto_correction` is truncated importance sampling by tokens for such an engine,
    and none for a generator that decodes with the policy itself. None: no weights."""
    beta: NotNegative = 0.0
    """Weight of the KL in the loss."""
    reward_beta: NotNegative = 0.0
    """Weight of the KL in the reward."""
    reward_kl: Callable = imported("lit_rl.ops.kl.k1")
    """The estimator of the KL in the reward, computed when the rollout is taken."""
    kl_control: FixedKL | AdaptiveKL | KLControl | None = None
    """Controller of the weights of the KL during the run. None keeps them."""
    whitening: Callable | None = None
    """`(advantages, ...) -> advantages`, to mean 0 and variance 1 over the rows or tokens of all ranks; it
    names `scored` (rows) or `mask` (tokens; a row's advantage then counts once a token). None: no whitening."""
    shaping: Callable | None = None
    """`(rewards, group_id, ...) -> rewards`: the first transformation of the rewards of rows; it may also name
    `lengths` and `ended`."""
    reward_norm: RunningNorm | None = None
    """Running normalisation of the rewards, after the shaping."""
    reward_clip: tuple[float, float] | None = None
    """Lowest and highest reward of a row, after the normalisation, before the KL is subtracted."""
    advantage_clip: Positive | None = None
    """Largest size of an advantage."""
    rejection: Callable | None = None
    """`(old_logprobs, sampler_logprobs, mask) -> bool (b, t)`: tokens that stay in the loss."""
    weight_norm: Callable | None = None
    """`(weights, totals) -> (b, t)`: normalisation of the weights to mean 1 over the optimizer step."""
    selection: Callable | None = None
    """`(entropy, mask, step) -> bool (b, t)`: tokens that the policy loss acts on."""
    off_policy_threshold: Positive | None = None
    """Rows with a negative advantage that have moved further than this from the policy that sampled them, in
    nats a token, take no part in the policy loss (2512.02556, eq. 9). None: all do."""
    entropy: FixedEntropy | AdaptiveEntropy | None = None
    """Coefficient of the entropy bonus. None: no bonus."""
    router_aux_loss_coef: NotNegative = 0.0
    """Weight of the router's load-balancing loss of a mixture-of-experts model."""
    mask_truncated: bool = False
    """Leave completions that `max_new_tokens` truncated out of the loss."""
    replay: GroupReplay | None = None
    """Buffer of good groups of earlier rollouts, which replace groups without spread. None: no buffer."""
    env: Interactive | None = None
    """Tools or an environment that answer the policy between its turns, or a function that makes whole
    rollouts. None: a completion is one turn."""
    ptx: SupervisedText | None = None
    """Supervised text that is learned together with the rollouts. None: none."""
    ptx_coef: NotNegative = 0.0
    """Weight of the supervised loss, in the first optimizer step."""
    ptx_loss: Callable = imported("lit_rl.ops.imitation.cross_entropy")
    """The loss of each token of the supervised text, from its log-prob `(b, t)`."""
    ptx_decay_steps: AtLeastOne | None = None
    """Optimizer steps over which the weight goes to `ptx_final_coef` in a straight line. None: it stays."""
    ptx_final_coef: NotNegative = 0.0
    """Weight of the supervised loss after `ptx_decay_steps`."""
    echo_coef: NotNegative = 0.0
    """Weight of the cross-entropy of the tokens that tools or an environment wrote, a model of the world (ECHO;
    prime-rl takes 0.1). Only with `env`."""
    teacher: RolloutTeacher | None = None
    """A teacher that scores the tokens of each rollout: a second model, or the policy itself behind another prompt.
    None: no teacher."""
    distillation: DistillationForm | None = None
    """The way in which the policy learns from the teacher, beside the rewards. None: by adding log T - log S to the
    advantage of each token."""
    skip_zero_advantages: bool = True
    """Leave rows whose advantages are all 0 out of the training's forward pass, if that changes no gradient: if
    no other term learns from them, and loss and reduction declare that (`lit_rl.ops.traits`)."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """Settings of group-relative policy optimisation (GRPO)."""

    advantage: Callable = imported("lit_rl.ops.advantages.group_normalized")


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(PolicyGradientConfig):
    """Settings of REINFORCE leave-one-out (RLOO)."""

    advantage: Callable = imported("lit_rl.ops.advantages.leave_one_out")
    """Estimator of advantages from rewards."""
    loss: Callable = imported("lit_rl.algorithms.rloo.SEQUENCE_CLIPPED")
    """The loss of each token."""
    reduction: Callable = imported("lit_rl.ops.reductions.sequence_mean")
    """The average of the loss over tokens and sequences."""
    reward_beta: NotNegative = 0.05
    """Weight of the KL in the reward."""
    group_size: AtLeastOne = 2
    """Completions a prompt, 2 or more."""


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(PolicyGradientConfig):
    """Settings of REINFORCE++, REINFORCE, ReMax and the like."""

    advantage: Callable = imported("lit_rl.ops.returns.reinforce_plus_plus")
    """Estimator of advantages from rewards."""
    group_size: AtLeastOne = 1
    """Completions a prompt, 1 or more."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PolicyGradientConfig):
    """Settings of proximal policy optimisation (PPO)."""

    critic: Critic | None = None
    """The value function. None is a separate model that starts as a copy of the policy."""
    critic_lr: Positive | None = None
    """Learning rate of the critic. None: the optimizer's."""
    critic_scheduler: ScheduleLike | None = None
    """Schedule of the critic's learning rate. None: the policy's."""
    critic_warmup: AtLeastZero = 0
    """Optimizer steps at the start in which only the critic learns."""
    advantage: Callable = imported("lit_rl.ops.returns.gae")
    """`(token_rewards, values, mask) -> (advantages, returns)`, all `(b, t)`."""
    whitening: Callable | None = imported("lit_rl.ops.advantages.whiten_tokens")
    """Normalisation of the advantages to mean 0 and variance 1 over the tokens of all ranks. None: none."""
    value_clip: Positive | None = 0.2
    """Largest change of a value from the rollout's in its loss. None: no bound."""
    vf_coef: NotNegative = 0.1
    """Weight of the critic's loss."""
    reward_adapter: str | None = None
    """A reward model that is an adapter on the policy's base, by folder or hub id. Its score is added to the
    rewards as the function `reward_adapter`. None: no such model."""
    reward_beta: NotNegative = 0.05
    """Weight of the KL in the reward."""
    group_size: AtLeastOne = 1
    """Completions a prompt, 1 or more."""
    iterations: AtLeastOne = 4
    """Passes over a rollout."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(PolicyConfig):
    """Settings of methods that learn from a data set."""

    model: ModelLike = field(default=REQUIRED, kw_only=False)
    """The model to train: a description, or its name, folder or hub id."""
    router_aux_loss_coef: NotNegative = 0.0
    """Weight of the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), which is defined over
    a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class OfflinePolicyConfig(OfflineConfig, GeneratingConfig):
    """Settings of methods that train a policy from a data set."""

    reward: Rewards | Callable | None = field(default=None, kw_only=False)  # pyright: ignore (None here)
    """Reward functions and weights, or one function, for the completions that validation generates; None only
    generates them. Nothing is learned from it."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflinePolicyConfig):
    """Settings of supervised fine-tuning."""

    imitation: Callable = imported("lit_rl.ops.imitation.cross_entropy")
    """The loss of each token, from the log-probs `(b, t)` of the texts' tokens."""
    neftune_alpha: Positive | None = None
    """Scale of uniform noise on the embeddings in training, above 0 (NEFTune; 5 in the paper). None: no noise."""


@dataclass(frozen=True, kw_only=True)
class GKDConfig(OfflinePolicyConfig):
    """Settings of generalised knowledge distillation."""

    model: ModelLike = field(default=REQUIRED, kw_only=False)
    """The student: a description, or its name, folder or hub id."""
    teacher: LanguageModel | str = REQUIRED
    """The model to distil: a description, or its name, folder or hub id, which gets the student's dtype. It
    must have the student's tokenizer; if their embeddings are padded to different lengths, the rows after the
    tokenizer's last token are left out of both distributions."""
    teacher_device: Literal["cpu"] | None = None
    """"cpu" keeps the teacher on the CPU; None places it like the policy."""
    beta: Portion = 0.5
    """The divergence, in [0, 1]: 0 the forward KL(T || S), 1 the reverse KL(S || T), 0.5 Jensen-Shannon's."""
    temperature: Positive = 1.0
    """Divisor of both models' logits in the divergence, above 0. Sampling has its own."""
    on_policy_fraction: Portion = 0.5
    """Share of the optimizer steps with completions of the student, in [0, 1]."""
    teacher_completions: bool = False
    """Let the teacher generate in the other steps; False takes the completions of the data."""


@dataclass(frozen=True, kw_only=True)
class PairConfig(OfflinePolicyConfig):
    """Settings of methods that learn from pairs."""

    beta: Positive = 0.1
    """Scale of the implicit reward, above 0."""
    preference: Callable | dict[str, Callable] = imported("lit_rl.ops.preference_losses.sigmoid")
    """The loss of a pair, or several by name, which are added with their weights (MPO, 2411.10442)."""
    preference_weights: dict[str, float] | None = None
    """Weight of each of them by name (1 by default)."""


@dataclass(frozen=True, kw_only=True)
class PrecomputedConfig(PolicyConfig):
    """Settings of methods that can compute the reference's log-probs once, before the first step."""

    precompute_reference: bool = False
    """Compute the reference's log-probs of all rows once, before the first step, keep them on disk, and train
    without the reference in memory. Batches of `data.val_batch_size` rows; the same numbers."""
    reference_cache: str | None = None
    """Folder for them; runs with the same data and reference share them. null: `cache` in `run_dir`."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PrecomputedConfig, PairConfig):
    """Settings of direct preference optimisation."""

    beta: Positive = 0.1
    """Scale of the implicit reward beta (log pi - log pi_ref), above 0."""
    divergence: Callable = imported("lit_rl.ops.preference_losses.reverse_kl")
    """The divergence from the reference, as a function from a log ratio to a score."""
    tail_weight: Portion = 1.0
    """Weight of the tokens beyond the shorter completion of a pair, in [0, 1] (LD-DPO). 1 is off."""
    likelihood_weights: bool = False
    """Weigh a pair by the policy's own likelihood of both completions (WPO, 2406.11827, eq. 2)."""


@dataclass(frozen=True, kw_only=True)
class CPOConfig(PairConfig):
    """Settings of contrastive preference optimisation."""

    beta: Positive = 0.1
    """Scale of the reward beta log pi, above 0. Losses of the log-prob per token need a larger one."""
    nll_coef: NotNegative = 1.0
    """Weight of the negative log-likelihood of the chosen completions, at least 0."""


@dataclass(frozen=True, kw_only=True)
class TPOConfig(PairConfig):
    """Settings of triple preference optimisation."""

    beta: Positive = 0.01
    """Scale of the reward beta log pi, above 0. Losses of the log-prob per token need a larger one."""
    nll_coef: Positive = 1.0
    """Weight of the negative log-likelihood of the references, above 0."""


@dataclass(frozen=True, kw_only=True)
class ORPOConfig(OfflinePolicyConfig):
    """Settings of odds ratio preference optimisation."""

    beta: Positive = 0.1
    """Weight of the odds ratio, the paper's lambda, above 0."""


@dataclass(frozen=True, kw_only=True)
class VerdictConfig(PrecomputedConfig, OfflinePolicyConfig):
    """Settings of methods that learn from verdicts: completions that are labelled good or bad."""

    beta: Positive = 0.1
    """Scale of the implicit reward beta (log pi - log pi_ref), above 0."""


@dataclass(frozen=True, kw_only=True)
class KTOConfig(VerdictConfig):
    """Settings of Kahneman-Tversky optimisation."""

    verdict: Callable = imported("lit_rl.ops.preference_losses.kto")
    """The loss of a completion, with the weights of both classes."""


@dataclass(frozen=True, kw_only=True)
class BCOConfig(VerdictConfig):
    """Settings of binary classifier optimisation."""

    prompt_weights: DensityRatio | None = None
    """Weights of undesirable completions by their prompts. None: all weigh the same."""


@dataclass(frozen=True, kw_only=True)
class JudgedConfig(OnPolicyConfig):
    """Settings of online methods with a judge."""

    reward: Rewards | Callable | None = field(default=None, kw_only=False)  # pyright: ignore (None here)
    """Reward functions and weights, or one function, whose sum the default judge compares; None if the judge
    needs no rewards."""
    judge: Judge | Callable[..., Any] | None = None
    """Judge of which of two completions is better: a judge of `lit_rl.rewards`, or a function. None compares
    the summed rewards. With more than two completions a prompt it compares every pair. It also gives the win
    rates of validation (`eval.win_rate_against`)."""
    beta: Positive | Sequence[Positive] = 0.1
    """Strength of the KL to the reference, above 0; or a list, one for each epoch, the last for all after it."""
    missing_eos_penalty: Positive | None = None
    """Penalty on the reward of a completion that `max_new_tokens` truncated, before it is judged. None: no
    penalty."""
    group_size: AtLeastTwo = 2
    """Completions a prompt."""


@dataclass(frozen=True, kw_only=True)
class JudgedPairsConfig(JudgedConfig):
    """Settings of online methods with a judge and a loss of pairs."""

    beta: Positive | Sequence[Positive] = 0.1
    """Scale of the implicit reward beta (log pi - log pi_ref), above 0; or a list, one for each epoch."""
    preference: Callable | dict[str, Callable] = imported("lit_rl.ops.preference_losses.sigmoid")
    """The loss of a pair, or several by name, which are added with their weights (MPO, 2411.10442)."""
    preference_weights: dict[str, float] | None = None
    """Weight of each of them by name (1 by default)."""
    per_token: bool = False
    """Divide by the length in the losses that do so (ipo, sigmoid_norm, simpo). Off, a completion counts as one
    token for them: they read sums, as in TRL's online DPO. An error if no loss is one of these."""


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(JudgedPairsConfig):
    """Settings of online direct preference optimisation."""


@dataclass(frozen=True, kw_only=True)
class NashMDConfig(JudgedConfig):
    """Settings of Nash mirror descent."""

    judge: Judge | Callable[..., Any] | None = None
    """Judge of which of two completions is better. None compares the summed rewards, with probabilities 0 and
    1; `RewardJudge(soft=True)` gives the Bradley-Terry probability."""
    mixture_coef: Portion | Sequence[Portion] = 0.5
    """`c`, in [0, 1]: 0 is the policy itself, 1 the reference; or a list, one for each epoch."""


@dataclass(frozen=True, kw_only=True)
class XPOConfig(JudgedPairsConfig):
    """Settings of exploratory preference optimisation."""

    alpha: NotNegative | Sequence[NotNegative] = 1e-05
    """Weight of the exploration bonus, at least 0; or a list, one for each epoch, the last for all after it."""


@dataclass(frozen=True, kw_only=True)
class ScalarConfig(OfflineConfig):
    """Settings of the training of scoring models."""

    model: ModelLike = field(default=REQUIRED, kw_only=False)
    """The language model whose trunk it starts from, or a scoring model of the same kind to train further: a
    description, or its name, folder or hub id. In Python also a classifier that is already loaded."""
    seed: int = 0
    """Seed of the fresh head."""
    micro_batch_size: AtLeastOne | Literal["auto"] | None = None
    """Rows of a forward pass on each rank, instead of `trainer.accumulate_grad_batches`; "auto" takes as many
    as fit into memory."""
    reference: None = field(default=None, init=False)  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass(frozen=True, kw_only=True)
class RewardModelingConfig(ScalarConfig):
    """Settings of the training of a reward model."""

    model: ModelLike = field(default=REQUIRED, kw_only=False)
    """The language model whose trunk it starts from, or a reward model to train further: a description, or its
    name, folder or hub id."""
    center_coef: NotNegative = 0.0
    """Weight, at least 0, of the term that pulls the sum of a pair's two rewards to 0, which preferences leave
    open. TRL recommends 0.01."""


@dataclass(frozen=True, kw_only=True)
class ProcessRewardModelingConfig(ScalarConfig):
    """Settings of the training of a process reward model."""

    model: ModelLike = field(default=REQUIRED, kw_only=False)
    """The language model whose trunk it starts from, or a process reward model to train further: a description,
    or its name, folder or hub id."""
