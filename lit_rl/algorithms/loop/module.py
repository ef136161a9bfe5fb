"""The base of all algorithms: loading, sharding, optimizer, clipping, memory plan, checkpoints.

Mechanics only: no advantage, no loss and no reward formula is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.algorithms.checks import argument_checks, data_and_trainer, strategy_checks
from lit_rl.algorithms.checks.memory import Memory
from lit_rl.algorithms.checks.micro_batching import MicroBatches, MicroBatchPlan, StepRows
from lit_rl.algorithms.checks.model_sizes import StepFacts, memory_of_step
from lit_rl.algorithms.checks.strategy_checks import Feature
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.loop.run_identity import CONFIG_GROUPS, Record, RunIdentity, model_record, run_settings
from lit_rl.algorithms.loop.save_on_error import SaveOnError
from lit_rl.algorithms.optim import master_weights
from lit_rl.algorithms.optim.broken_steps import BrokenSteps, save_bad_batch
from lit_rl.algorithms.optim.optimizers import AdamW, OptimizerFactory
from lit_rl.algorithms.optim.schedules import FromTorch, Linear, Schedule, as_schedule, scheduler_by_group
from lit_rl.algorithms.optim.strategies import (
    FSDPTPStrategy,
    ZeROStrategy,
    drop_gradients,
    offload_policy,
    shards_weights,
    step_one_by_one,
)
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.phase_costs import RunCosts
from lit_rl.core import upstream
from lit_rl.core.errors import ConfigError, check_instance, seed_in_range
from lit_rl.core.process_state import preserve_generators
from lit_rl.models.hf_export import ExportForm
from lit_rl.models.kernels import fixed_order
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.loaded_model import LoadedModel, as_language_model
from lit_rl.models.references import Auto, FrozenCopy, Reference, Scorer
from lit_rl.models.sharding import clip_over_meshes, full_state_dict, parallelize_layers, shard
from lit_rl.models.verified_folder import ExportReport
from lit_rl.settings.algorithms import PolicyConfig
from lit_rl.settings.base import takes

PROGRESS_BAR_METRICS = {
    "train/reward": "reward",
    "train/kl": "kl",
    "train/rewards/accuracies": "accuracy",
    "train/mean_token_accuracy": "token_accuracy",
    "train/loss": "loss",
}
"""Training metrics in Lightning's progress bar, with their short names."""


class PolicyModule(L.LightningModule, argument_checks.CheckedArguments):
    """A LightningModule with a policy, which is described in the constructor and loaded in `configure_model`."""

    @takes(PolicyConfig)
    def __init__(self, settings: PolicyConfig) -> None:
        super().__init__()
        self.model = as_language_model(settings.model, settings.tokenizer)
        self.reference: Reference = Auto() if settings.reference is None else settings.reference
        self.optimizer: OptimizerFactory = AdamW() if settings.optimizer is None else settings.optimizer
        argument_checks.check_reference(self.reference)
        argument_checks.check_optimizer_factory(self.optimizer)
        check_instance("seed", settings.seed, int, "a whole number, such as seed=0")
        self.scheduler: Schedule | FromTorch = (
            Linear() if settings.scheduler is None else as_schedule(settings.scheduler)
        )
        seed_in_range("algo.seed", settings.seed)
        self.seed = settings.seed
        self.micro_batches = MicroBatches(settings.micro_batch_size)
        self.command = ""
        """The command line of the training, for the cards of exports; empty if there was none."""
        self.precision_by_device = False
        self.policy: Any = None
        self.reference_policy: Scorer | None = None
        self.grad_norm = torch.zeros(())
        self.broken_steps = BrokenSteps()
        self.costs = RunCosts()
        self.identity = RunIdentity()
        self._generators = checkpoints.GlobalGenerators()
        self.in_a_step = False
        """True if a step has begun and not ended: its counts are in no checkpoint."""
        self.optimizer_is_stepping = False
        """True if the optimizer is stepping: an error in it may leave weights partly updated."""
        self.metrics_step: int | None = None
        """The optimizer step of the training metrics that callbacks see."""
        self.strict_loading = (
            False  # checkpoints contain trained tensors only; `check_trained_tensors` is the strict check
        )

    takes_images = True
    """True if prompts may contain images."""

    needs_reference = False
    """True if a term of the objective reads the reference; otherwise no reference is loaded."""

    export_form = ExportForm(tags=("reinforcement-learning",))
    """The form of the trained model's export."""

    trained_beside: tuple[str, ...] = ()
    """Attribute names of the `companions` that are trained: their weights are in checkpoints too."""

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @L.LightningModule.trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        """Check the Trainer and its data module. Lightning attaches the data just before, unchecked."""
        if isinstance(trainer, L.Trainer):
            argument_checks.check_trainer(type(self).__name__, trainer, compiled=upstream.is_compiled(self))
            came, trainer.datamodule = trainer.datamodule, None  # pyright: ignore
            argument_checks.check_data_module(
                type(self), came
            )  # detached: Lightning would call its hooks while it handles the error
            trainer.datamodule = came  # pyright: ignore
        L.LightningModule.trainer.fset(self, trainer)  # pyright: ignore

    @property
    def trainer_or_none(self) -> L.Trainer | None:
        """The Trainer, or None if the module is used by hand (a notebook's cells)."""
        try:
            return self.trainer if self.fabric is None else None  # beside a Fabric, `trainer` is a stand-in
        except RuntimeError:
            return None

    @property
    def forward_options(self) -> ForwardOptions:
        """Options of the forward pass of log-probs.

        With sharded weights each rank must call the model as often as the others, so all rows go into one call, without
        gradient too: ranks do not agree on how many fit.
        """
        trainer, options = self.trainer_or_none, self.model.forward_options
        if trainer is not None and shards_weights(trainer.strategy):
            return options.in_one_call
        return replace(options, most_rows=self.micro_batches.most_texts)

    @property
    def ranks(self) -> Ranks:
        """The data-parallel ranks of the run, which have rows of their own; this process alone if used by hand."""
        trainer = self.trainer_or_none
        return Ranks.of(trainer, self.device) if trainer else Ranks(self.device)

    def check_processes(self, data: Any, trainer: Any) -> None:
        """Refuse settings that do not fit the number of processes, before any of them is started.

        The command lines call this. In Python Lightning calls no method before `trainer.fit` has started the processes:
        there `setup` refuses the same on every rank, before weights are read.

        Args:
            data: The run's data module; its rows need not be read yet.
            trainer: The Trainer.

        Raises:
            ConfigError: a step does not divide over them, and so on; as `setup` would.
        """

    def setup(self, stage: str) -> None:
        """Check the strategy and the precision. `trainer.precision=bf16-true` sets the dtype of the weights only."""
        strategy = self.trainer.strategy
        data_and_trainer.check_trainer_settings(self.trainer)
        argument_checks.refuse_damaged_checkpoints(strategy)
        strategy_checks.check_before_loading(
            type(self),
            self.features(),
            self.model,
            reference=self.reference if self.needs_reference else None,
            optimizer=self.optimizer,
            trainer=self.trainer,
            stage=stage,
        )
        if master_weights.replace_half_precision(strategy) and not isinstance(strategy, ModelParallelStrategy):
            self.model = self.model.held_in("bfloat16")

    def configure_callbacks(self) -> list[L.Callback]:
        """Add `SaveOnError` unless the Trainer has one. It comes first: a callback that raises in `on_exception` keeps
        later ones from being called."""
        callbacks: list[L.Callback] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if not any(isinstance(each, SaveOnError) for each in callbacks):
            callbacks.insert(0, SaveOnError())
        return []

    def features(self) -> Iterator[Feature]:
        """Yield the features in use that a strategy must be proven with."""
        if self.needs_reference and not isinstance(self.reference, Auto | FrozenCopy):
            name = type(self.reference).__name__
            yield Feature("other reference", f"reference={name}", "Take reference=frozen_copy")

    # ------------------------------------------------------------------ memory

    def step_facts(self) -> StepFacts:
        """Return the facts of a step that its memory depends on. A method replaces those that are its own."""
        return StepFacts(reference=self.reference if self.needs_reference else None)

    def memory(self) -> Memory | None:
        """Return the memory of a rank, as a function of the micro-batch; None if it is not known."""
        loaded = chain(self.parameters(), self.buffers())
        budget, host = self.micro_batches.budgets(self.trainer, loaded)
        facts = self.step_facts()
        sizes = memory_of_step(facts, self.model, self.optimizer, self.trainer, budget=budget, host=host)
        return None if sizes is None else self.micro_batches.as_planned(sizes)

    def split_step(self, step: StepRows) -> None:
        """Split the optimizer step of a rank, and set the Trainer's micro-batches.

        Raises:
            ConfigError: nothing fits, or the user's micro-batches do not divide the step.
        """
        self.micro_batches.begin(step, self.trainer, self.model.gradient_checkpointing)
        self.micro_batches.split(self.trainer, self.memory())

    @property
    def parts_of_step(self) -> int:
        """The divisor that the user's micro-batches require of a rank's rows of a step."""
        return self.micro_batches.parts_of_rows(self.trainer)

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.micro_batches.restore(self.trainer)

    # ------------------------------------------------------------------ loading

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse direct calls: a Trainer trains the module, and `module.policy` is the network."""
        raise ConfigError(
            f"{type(self).__name__} is not called. Train it with trainer.fit(module, datamodule=...); of tokens call "
            "module.policy(input_ids) after module.configure_model()."
        )

    def configure_model(self) -> None:
        """Load the policy, and the reference if a term needs it. Lightning calls it; by hand, call it once."""
        if self._fitting:
            self.identity.settings = self._settings()
        if self.policy is not None:
            return
        strategy = self.trainer_or_none.strategy if self.trainer_or_none else None
        if self.model.sees:
            strategy_checks.check_images(self.model, type(self).__name__, strategy, taken=self.takes_images)
        with preserve_generators():
            torch.manual_seed(self.seed)  # fresh adapters are random: equal on every rank and in every run
            policy = self.load_policy()
            strategy_checks.check_loaded_policy(policy, strategy, trains=self._fitting)
            reference = self.reference.module(policy) if self.needs_reference else None
            others = self.companions(policy)
        stays = reference if self.needs_reference and not self.reference.moves else None
        self.identity.model = model_record(self.model, policy, stays)
        if isinstance(strategy, ModelParallelStrategy):
            mesh = strategy.device_mesh["data_parallel"]
            how = master_weights.shard_precision(strategy), offload_policy(strategy)
            for module in (policy, reference, *others.values()):
                if isinstance(module, nn.Module):
                    if isinstance(strategy, FSDPTPStrategy):
                        parallelize_layers(module, strategy.device_mesh["tensor_parallel"])
                    shard(module, mesh, *how)
        self.policy, self.reference_policy = policy, reference
        for name, module in others.items():
            setattr(self, name, module)
        self.micro_batches.set_checkpointing(self.model.gradient_checkpointing, self.trained_modules.values())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as torch does, and load the policy first if it is not.

        Processes spawned from this one (`ddp_notebook`, `ddp_spawn`) send back weights while no policy is loaded here.
        """
        if self.policy is None and any(name.startswith("policy.") for name in state_dict):
            self.configure_model()
            if isinstance(self.model, LoadedModel):
                self.model.note_training()
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def load_policy(self) -> nn.Module:
        """Load the trained model from its description: a language model, unless a method trains another head."""
        return self.model.load()

    def export(self, weights: Mapping[str, Tensor], folder: str | Path, facts: Mapping[str, Any]) -> ExportReport:
        """Write the trained model as a Hugging Face folder, and verify it.

        Args:
            weights: Every tensor of the policy, unsharded, under the policy's own names.
            folder: A new folder, or an earlier export, which is replaced.
            facts: Facts for the model card, see `model_card`.
        """
        return self.export_form.write(self.model, self.policy, weights, folder, facts)

    def save_pretrained(self, folder: str | Path) -> ExportReport | None:
        """Call `export` with the current weights, and a card that names model and method.

        Called on all ranks; rank 0 writes.

        Args:
            folder: A new folder, or an earlier export, which is replaced.

        Returns:
            The report of the verification; None on other ranks.

        Raises:
            ConfigError: the policy is not loaded yet.
        """
        if self.policy is None:
            raise ConfigError("The policy is not loaded yet: call trainer.fit, or module.configure_model(), first.")
        weights = full_state_dict(self.policy)
        facts = {"base_model": self.model.name, "algorithm": type(self).__name__.lower()}
        trainer = self.trainer_or_none
        return self.export(weights, folder, facts) if trainer is None or trainer.is_global_zero else None

    def companions(self, policy: nn.Module) -> dict[str, nn.Module]:
        """Return further modules, trained or frozen, made from the loaded policy, by attribute name."""
        return {}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, the policy's first."""
        return [{"params": [p for p in self.policy.parameters() if p.requires_grad], "name": "policy"}]

    def schedules(self) -> list[Schedule | FromTorch]:
        """Return one schedule for each parameter group."""
        return [self.scheduler]

    def configure_optimizers(self) -> Any:
        strategy, groups = self.trainer.strategy, self.parameter_groups()
        trained = checkpoints.trained_tensors(self.trained_modules)
        trained = {name: tensor for name, tensor in trained.items() if tensor.requires_grad}
        strategy_checks.check_trainable_weights(trained, strategy)
        strategy_checks.check_optimizer_shards(self.optimizer, strategy)
        keeps_its_own = isinstance(strategy, DeepSpeedStrategy)
        optimizer = self.optimizer(groups) if keeps_its_own else master_weights.with_masters(self.optimizer, groups)
        argument_checks.check_made_optimizer(optimizer)
        strategy_checks.check_optimizer(optimizer, strategy)
        if master_weights.averages_gradients(optimizer, strategy):
            strategy.model.require_backward_grad_sync = False  # pyright: ignore
        if isinstance(strategy, FSDPTPStrategy):
            step_one_by_one(optimizer)
        upstream.keep_gradients_scaled(optimizer)
        schedule = scheduler_by_group(optimizer, data_and_trainer.total_steps(self.trainer), self.schedules())
        self.identity.note_optimizer(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, and keep the norm from before the clipping. Without a limit the norm is measured too.

        It is the last hook before the optimizer updates weights.
        """
        self.optimizer_is_stepping = True
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            return  # the engine clips in its step, with the Trainer's setting: see `optimizer_step`
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if master_weights.averages_gradients(optimizer, strategy):
            master_weights.average_over_ranks(trained, self.ranks.world_size)
        by_value = gradient_clip_algorithm == "value"
        limit = math.inf if by_value or not gradient_clip_val else gradient_clip_val
        if isinstance(strategy, FSDPStrategy):
            norm = self.trainer.model.clip_grad_norm_(limit)  # pyright: ignore
        elif isinstance(strategy, FSDPTPStrategy):
            norm = clip_over_meshes(self.policy, strategy.device_mesh["tensor_parallel"], trained, limit)
        else:
            norm = nn.utils.clip_grad_norm_(trained, limit)
        self.grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).detach()
        if by_value:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if self.broken_steps.should_skip(float(self.grad_norm), scaled=scaled):
            drop_gradients(optimizer, strategy)
            self._report_broken()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with fixed_order(loss.device):
            super().backward(loss, *args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take an optimizer step. DeepSpeed's engine clips by itself and skips a step that is not finite."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.optimizer_is_stepping = self.in_a_step = False
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            norm = strategy.gradient_norm
            self.grad_norm = torch.tensor(norm)
            if self.broken_steps.should_skip(norm, scaled=False):
                self._report_broken()

    def _report_broken(self) -> None:
        """Save the batch of a skipped step, and report it."""
        norm, kept = float(self.grad_norm), ""
        if not self.trainer.fast_dev_run:  # pyright: ignore
            batch = {"step": self.global_step + 1, "grad_norm": norm, **self.step_batch()}
            kept = save_bad_batch(Path(self.trainer.default_root_dir), self.global_rank, batch)
        self.broken_steps.report(self.global_step + 1, norm, kept)

    def step_batch(self) -> dict[str, Any]:
        """Return the data of the current optimizer step, saved if it is broken: tensors, numbers and strings."""
        return {}

    def after_step(self) -> None:
        """Update what changes between optimizer steps. Called after each of them."""
        if self.needs_reference:
            self.reference.update(self.policy, self.reference_policy, self.global_step + 1)

    def coefficients(self) -> dict[str, float]:
        """Return current values of coefficients that change during the run, for the log."""
        return {}

    def on_fit_start(self) -> None:
        self.policy.train()  # from_pretrained returns evaluation mode, which silently turns gradient checkpointing off

    # ------------------------------------------------------------------ validate, test

    def on_validation_epoch_end(self) -> None:
        logged = self.log_evaluation("val")
        if self._fitting and not self.trainer.sanity_checking:
            data_and_trainer.check_monitors(self.trainer, logged, may_come=self.may_log)

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")

    def log_evaluation(self, stage: str) -> set[str]:
        """Log the metrics of every validation set, and return their names."""
        return set()

    def may_log(self, name: str) -> bool:
        """Tell whether a metric that no step has logged so far may be logged later."""
        return False

    def write_to_loggers(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics, already reduced over ranks, to the Trainer's loggers as those of an optimizer step."""
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)  # pyright: ignore[reportArgumentType]

    def publish_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Publish reduced training metrics to callbacks and Lightning's progress bar, as `log` would.

        Lightning makes a metric object of each logged number, moves it to the device, and visits all of them again at
        every batch: thirty cost the host some ten milliseconds, and each waits for the device.

        Args:
            metrics: Metrics by name, already reduced over ranks.
            step: The optimizer step of the metrics.
        """
        in_bar = {short: metrics[name] for name, short in PROGRESS_BAR_METRICS.items() if name in metrics}
        told = metrics | in_bar
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in told.items()})
        self.trainer.progress_bar_metrics.update(in_bar)
        if self.metrics_step is None:
            data_and_trainer.check_monitors(self.trainer, metrics, "train/", self.may_log)
        self.metrics_step = step

    def on_train_epoch_end(self) -> None:
        """Log the remaining metrics at the end of the run, before callbacks see the end."""
        trainer, last = self.trainer, self.trainer.current_epoch + 1 == self.trainer.max_epochs
        if last or trainer.should_stop or 0 <= trainer.max_steps <= self.global_step:
            self.log_rest()

    def log_rest(self) -> None:
        """Log the optimizer steps since the last log line. A checkpoint taken now does not depend on that line."""

    def log_validation(self, metrics: dict[str, float]) -> set[str]:
        """Log under the number of the step, and return the names."""
        if self._fitting and not self.trainer.sanity_checking:
            self.write_to_loggers(metrics, self.global_step)  # `log_dict` counts a step less at an epoch's end
        self.log_dict(metrics, logger=not self._fitting, batch_size=1)
        return set(metrics)

    # ------------------------------------------------------------------ checkpoints

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's state besides weights for an exact resume; tensors, numbers and strings only."""
        return {}

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        """Restore what `rank_state` returned."""

    def merge_rank_states(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the argument of `load_rank_state` for a checkpoint of another number of ranks.

        Args:
            saved: The `rank_state` of each of these ranks.
        """
        return {}

    def state_kept_on_rollback(self) -> dict[str, Any]:
        """Return the part of `rank_state` that a rollback to an earlier checkpoint does not change."""
        return {}

    def roll_back_to(self, checkpoint: dict[str, Any]) -> None:
        """Roll back to the weights, the reference and the controllers of an earlier checkpoint of this run.

        Data and counts go on from where they are. Called between two rollouts, or two log lines; the optimizer is not
        restored here.

        Raises:
            StorageError: the checkpoint is of another model.
        """
        checkpoints.check_trained_tensors(checkpoint["state_dict"], checkpoints.trained_tensors(self.trained_modules))
        self.load_state_dict(checkpoint["state_dict"], strict=False)  # checkpoints contain trained tensors only
        if self.needs_reference and self.reference.moves:
            checkpoints.load_reference(self.reference, self.reference_policy, checkpoint, required=self._fitting)
        saved = [each["module"] for each in checkpoint["lit_rl"]]
        self.load_rank_state(self.merge_rank_states(saved) | self.state_kept_on_rollback())
        self.broken_steps.in_a_row = 0

    @property
    def slots(self) -> int:
        """Batches of Lightning's loop for one step of the data's order, on this rank."""
        return self.trainer.accumulate_grad_batches  # pyright: ignore

    def describe_dropped_state(self, saved: Sequence[dict[str, Any]], slots: int) -> str:
        """Describe the state that is dropped on a resume with another number of ranks, and the next step of the run.

        Args:
            saved: The `rank_state` of each rank that wrote the checkpoint.
            slots: The value of `slots` in that run.
        """
        return "Nothing is dropped."

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save trained tensors only (no reference, no frozen base), every rank's own state, algorithm and precision."""
        if checkpoint.get("state_dict"):
            trained = checkpoints.trained_tensors(self.trained_modules)
            weights = {name: tensor for name, tensor in checkpoint["state_dict"].items() if name in trained}
            checkpoint["state_dict"] = weights
        checkpoint["algorithm"] = checkpoints.algorithm_kind(type(self))
        checkpoint["run"] = self.identity.record(self.identity.settings or self._settings())
        device = self.trainer.strategy.root_device if self.trainer_or_none else self.device
        mine = {"module": self.rank_state(), "rng": checkpoints.rng_state(device)}
        checkpoint["lit_rl"] = self.ranks.objects(mine | {"broken_steps": self.broken_steps.in_a_row})
        if self.trainer_or_none is not None:
            checkpoint["precision"] = str(self.trainer.precision)
        if self.micro_batches.plan is not None:
            checkpoint["micro_batch_plan"] = asdict(self.micro_batches.plan)
        if self.needs_reference and self.reference.moves:
            checkpoint["reference"] = self.reference.state(self.reference_policy)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **settings: Any) -> Any:  # pyright: ignore
        """Load as in Lightning, with the constructor's arguments: a checkpoint contains weights and state only.

        Raises:
            ConfigError: the file or the arguments are missing.
        """
        local = isinstance(checkpoint_path, (str, Path)) and "://" not in str(checkpoint_path)
        if local and not Path(checkpoint_path).exists():
            raise ConfigError(
                f"{cls.__name__}.load_from_checkpoint: no {str(checkpoint_path)!r} is there. A run's checkpoints are "
                "in the folder checkpoints of its run_dir, such as runs/mine/checkpoints/step_00000020.ckpt."
            )
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **settings)  # pyright: ignore
        except (TypeError, argument_checks.MissingArgument) as error:
            if isinstance(error, TypeError) and "required" not in str(error):
                raise
            raise ConfigError(
                f"{cls.__name__}.load_from_checkpoint needs what the constructor needs, beside the path ({error}): "
                f"{cls.__name__}.load_from_checkpoint(path, model='tiny', ...). A checkpoint holds no objects, as "
                "reading them could run code. To use a trained policy, load the export: the folder hf of its run."
            ) from error

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._fitting:
            checkpoints.check_algorithm_kind(checkpoint, type(self))
            if self.needs_reference and not self.reference.moves:
                checkpoints.check_reference_began(self.model, self.reference)
        allowed = self.model.allow_changed
        self.identity.compare(checkpoint, type(self).__name__, resumes=self._fitting, allow_changed=allowed)
        if weights := checkpoint.get("state_dict"):
            checkpoints.check_trained_tensors(weights, checkpoints.trained_tensors(self.trained_modules))
        if self._fitting:
            if self.precision_by_device:
                before = master_weights.checkpoint_precision(checkpoint)
                checkpoints.check_precision(before, str(self.trainer.precision))
            tensors = checkpoints.trained_tensors(self.trained_modules).values()
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            master_weights.check_masters(checkpoint.get("optimizer_states", ()), trained, self.optimizer)
        if self.needs_reference and self.reference.moves:
            checkpoints.load_reference(self.reference, self.reference_policy, checkpoint, required=self._fitting)
        ranks = checkpoint.get("lit_rl", ()) if self.trainer_or_none is not None else ()
        name, world_size = type(self).__name__, self.ranks.world_size
        if ranks and len(ranks) != world_size:
            if self._fitting:  # at the next rollout or step, whose micro-batches are planned anew
                sizes = {"slots": self.slots, "epoch": data_and_trainer.epoch_batches(self.trainer)}
                saved, slots = checkpoints.of_other_ranks(checkpoint, name, world_size=world_size, **sizes)
                self.load_rank_state(checkpoints.saved_by_algorithm(self.merge_rank_states(saved), name))
                self.broken_steps.in_a_row = ranks[0]["broken_steps"]
                self._generators.seed_by_step = True
                dropped = self.describe_dropped_state(saved, slots)
                rank_zero_info(checkpoints.describe_other_ranks(len(ranks), world_size, dropped))
            return
        if "micro_batch_plan" in checkpoint and self.micro_batches.size == "auto" and self._fitting:
            self.micro_batches.resume(MicroBatchPlan(**checkpoint["micro_batch_plan"]), self.trainer)
            self.micro_batches.set_checkpointing(self.model.gradient_checkpointing, self.trained_modules.values())
        if ranks:
            saved = ranks[self.ranks.rank]
            self.load_rank_state(checkpoints.saved_by_algorithm(saved["module"], name))
            self.broken_steps.in_a_row = saved["broken_steps"]
            self._generators.load(saved["rng"])

    def _settings(self) -> Record:
        """Return the settings that change what a run learns or logs, with the default objects of config groups."""
        arguments = {
            name: getattr(self, name, value) if value is None and name in CONFIG_GROUPS else value
            for name, value in self._arguments.items()
        }
        return run_settings(type(self), arguments, self.model, self.trainer_or_none)

    @property
    def _fitting(self) -> bool:
        return self.trainer_or_none is not None and self.trainer_or_none.state.fn == TrainerFn.FITTING

    def on_train_start(self) -> None:
        if self.identity.is_resumed:
            config, steps = self.trainer.lr_scheduler_configs[0], data_and_trainer.total_steps(self.trainer)
            schedules = self.schedules()
            config.scheduler = self.identity.apply_settings(
                self.trainer.optimizers[0],
                config.scheduler,  # pyright: ignore[reportArgumentType]
                lambda made: scheduler_by_group(made, steps, schedules),
                step=self.global_step,
            )
        if isinstance(self.model, LoadedModel):
            self.model.note_training()
        self._generators.start(self.seed, self.ranks.rank, self.global_step, self.trainer.strategy.root_device)

    @property
    def trained_modules(self) -> dict[str, nn.Module]:
        """The modules that are trained, by attribute name."""
        return {name: getattr(self, name) for name in ("policy", *self.trained_beside)}
