"""lit_rl's extension of vLLM's workers: `--worker-extension-cls lit_rl.generation.vllm.worker.WeightUpdates`.

It runs in vLLM's processes, in an environment that may differ from the trainer's. Over HTTP its methods are called
through `/collective_rpc`, with JSON values. An update is

    lit_rl_begin() -> lit_rl_load(...) or lit_rl_load_file(...), once or often -> lit_rl_finish(version)

and between begin and finish the engine must not generate. Names are strict: every weight that transformers' model of
the same config has, and none besides.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lit_rl.models.loading import RULED_OUT, auto_class
from lit_rl.models.vision_parts import placeholder_ids

_FACTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""The keys of a text config that distinguish the shapes of models."""


def shape_of(config: Any) -> dict[str, Any]:
    """Return architecture and sizes of a transformers config, on which an engine and a policy have to agree."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name) for name in _FACTS if getattr(text, name, None) is not None}
    return {"model_type": text.model_type, "tied": bool(config.tie_word_embeddings), **sizes}


class WeightUpdates:
    """A mixin of vLLM's worker class; `self` is the worker."""

    _lit_rl_open = False
    _lit_rl_version: int | None = None
    _lit_rl_names: dict[str, list[int]] | None = None
    _lit_rl_group: Any = None

    def lit_rl_facts(self) -> dict[str, Any]:
        """Return this worker's identity and contents: plain values.

        `instance` has a new value after every start, which shows that a server was restarted;
        `version` is that of the last finished update, None before it.
        """
        worker: Any = self
        if "_lit_rl_instance" not in worker.__dict__:
            worker._lit_rl_instance = uuid.uuid4().hex
        config = worker.vllm_config
        return {
            "instance": worker._lit_rl_instance,
            "version": worker._lit_rl_version,
            "model": shape_of(config.model_config.hf_config),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "block_size": config.cache_config.block_size,
            "logprobs_mode": config.model_config.logprobs_mode,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_lora_rank": config.lora_config.max_lora_rank if config.lora_config else None,
            "device": torch.device(worker.device).type,
        }

    def lit_rl_expect(self, shapes: dict[str, list[int]]) -> None:
        """Agree to the coming weights, by name and whole shape.

        Raises:
            ValueError: a weight is missing, unknown, or of another shape.
        """
        expected = self._lit_rl_expected()
        missing, unknown = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
        other = [name for name in shapes if name in expected and list(shapes[name]) != expected[name]]
        if missing or unknown or other:
            raise ValueError(
                f"the trainer's weights are not this model's: missing {missing[:5]}, unknown {unknown[:5]}, of another "
                f"shape {[(name, list(shapes[name]), expected[name]) for name in other[:5]]}."
            )

    def lit_rl_begin(self) -> None:
        """Open an update. One that was left half done is closed first; all weights have to come again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # pyright: ignore

        worker: Any = self
        if worker._lit_rl_open:
            self._lit_rl_close()
        model = worker.model_runner.get_model()
        rule_out(model, placeholder_ids(worker.vllm_config.model_config.hf_config))
        initialize_layerwise_reload(model)
        worker._lit_rl_open, worker._lit_rl_version = True, None
        worker._lit_rl_arrived, worker._lit_rl_loaded = set(), set()

    def lit_rl_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights over, under transformers' names. A tensor must keep its values until the update is finished.

        Raises:
            ValueError: no update is open, or a name or a shape that this model does not have.
        """
        from vllm.config import set_current_vllm_config  # pyright: ignore

        worker: Any = self
        if not worker._lit_rl_open:
            raise ValueError("no update is open: call lit_rl_begin first.")
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            loaded = worker.model_runner.get_model().load_weights(self._lit_rl_checked(weights))
        worker._lit_rl_loaded |= loaded or set()

    def lit_rl_load_file(self, path: str) -> None:
        """Load weights from a safetensors file that this machine can read."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            self.lit_rl_load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (no mapping)

    def lit_rl_join(self, host: str, port: int, first: int, world: int, patience: float) -> None:
        """Join the trainer's gloo group. The trainer is rank 0, this server's workers are `first` and those after."""
        worker: Any = self
        distributed: Any = torch.distributed
        limit = timedelta(seconds=patience)
        store = distributed.TCPStore(host, port, world, is_master=False, timeout=limit)
        rank = first + worker.rank
        worker._lit_rl_group = distributed.ProcessGroupGloo(
            distributed.PrefixStore("lit_rl", store), rank, world, limit
        )

    def lit_rl_receive(self, described: list[tuple[str, str, list[int]]]) -> None:
        """Receive weights that the trainer broadcasts, in this order: name, type and shape of each."""
        weights = []  # all first: a weight that is refused must not leave the trainer waiting
        for name, dtype, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._lit_rl_group.broadcast(tensor, 0).wait()
            weights.append((name, tensor))
        self.lit_rl_load(weights)

    def lit_rl_finish(self, version: int) -> None:
        """Close the update and stamp it.

        Raises:
            ValueError: a weight never came. The update stays open.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        missing = [name for name in self._lit_rl_expected() if name not in worker._lit_rl_arrived]
        if missing:
            raise ValueError(f"{len(missing)} weights never came: {', '.join(missing[:5])}.")
        own = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        # A tied head is the embedding itself: it is not loaded under its own name.
        tied = worker.vllm_config.model_config.hf_config.tie_word_embeddings
        heads = {name for name in own if tied and f".{name}".endswith(".lm_head.weight")}
        left = sorted(own - worker._lit_rl_loaded - heads) if worker._lit_rl_loaded else []
        if left:
            raise ValueError(f"vLLM's model took nothing for {len(left)} of its weights: {', '.join(left[:5])}.")
        self._lit_rl_close()
        worker.model_runner.reset_lora_state()
        self.lit_rl_stamp(version)

    def lit_rl_stamp(self, version: int) -> None:
        """Set the version of the policy that is held: after an update, or after an adapter was renewed."""
        worker: Any = self
        worker._lit_rl_version = version

    # ------------------------------------------------------------------ inside

    def _lit_rl_checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        worker: Any = self
        expected = self._lit_rl_expected()
        for name, tensor in weights:
            if name not in expected:
                raise ValueError(f"{name} is no weight of this model.")
            if list(tensor.shape) != expected[name]:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; this model's has {expected[name]}.")
            worker._lit_rl_arrived.add(name)
            yield name, tensor.to(worker.device)

    def _lit_rl_expected(self) -> dict[str, list[int]]:
        """Return names and shapes of the weights of transformers' model of this config; of tied ones, the first
        name."""
        worker: Any = self
        if worker._lit_rl_names is None:
            from lit_rl.models.engine_weights import weight_shapes

            config = worker.vllm_config.model_config
            kind = auto_class(config.hf_config)
            with torch.device("meta"):
                model = kind.from_config(config.hf_config, trust_remote_code=config.trust_remote_code)
            model.tie_weights()
            worker._lit_rl_names = {name: list(shape) for name, shape in weight_shapes(model).items()}
        return worker._lit_rl_names

    def _lit_rl_close(self) -> None:
        from vllm.config import set_current_vllm_config  # pyright: ignore
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # pyright: ignore

        worker: Any = self
        model = worker.model_runner.get_model()
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, worker.model_config)
            repack_heads(model)
        worker._lit_rl_open = False


def rule_out(model: Any, tokens: Sequence[int]) -> None:
    """Give tokens no probability, as the policy's own head does: placeholders of images. One call is enough.

    In the model and not in each request, since log-probs of a prompt know nothing of a request's settings.
    """
    if not tokens or "compute_logits" in vars(model):
        return
    whole = model.compute_logits

    def compute_logits(*given: Any, **named: Any) -> Any:
        logits = whole(*given, **named)
        if logits is not None:  # another rank has them
            logits[..., list(tokens)] = RULED_OUT
        return logits

    model.compute_logits = compute_logits


def repack_heads(model: Any) -> None:
    """Pack a tied output head again. On the CPU it holds its own packed copy of the embedding, which no reload renews:
    without this the head would silently stay that of the first weights."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
