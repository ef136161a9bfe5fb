"""Settings with which vLLM holds the policy, in this process and in a server, the files that it reads first, and the
key of a server.

`APIKeyMiddleware` is imported by name in the server's process (``--middleware``).
"""

from __future__ import annotations

import copy
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.models import hub_files
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.loading import check_causal
from lit_rl.models.trunk import base_of
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, Positive, Range, Share

WORKER_EXTENSION = "lit_rl.generation.vllm.worker.WeightUpdates"
"""Our extension of vLLM's workers: it takes over the weights of the policy."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM reserves memory; it runs an adapter of any lower rank."""

LoraRank = Annotated[int, Range(1, LORA_RANKS[-1], whole=True)]
"""A rank that vLLM has memory for."""

_CPU_CACHE_GIB = 1.0
_GIB = 2**30


@checked("generator")
@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine's start, which stay for its life.

    Args:
        dtype: Type of the weights and of the computation: "float32", "bfloat16" or "float16". None is `model.dtype`:
            another type gives other log-probs than training's.
        max_model_len: Longest prompt and response together, in tokens. None is what the model was built for, which may
            not fit into the cache.
        gpu_memory_utilization: Share of a GPU's memory that the engine may take, weights and key-value cache together,
            in (0, 1]. What is left is the training's where both use one GPU.
        kv_cache_gib: Key-value cache of a device in GiB, in place of ``gpu_memory_utilization``. None is 1 GiB on a
            CPU. On a CPU, vLLM's environment variable VLLM_CPU_KVCACHE_SPACE counts more.
        tensor_parallel_size: Devices that a copy of the model is cut over.
        max_num_seqs: Most sequences that run at once; more wait. None is vLLM's choice.
        max_lora_rank: Highest rank of an adapter that is sent by itself. None takes no adapters.
        enforce_eager: Compile nothing and capture no CUDA graphs: starts sooner, decodes slower on a GPU. None does so
            on a CPU only.

    Raises:
        ConfigError: a setting out of range.
    """

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_model_len: AtLeastTwo | None = None
    gpu_memory_utilization: Share = 0.3
    kv_cache_gib: Positive | None = None
    tensor_parallel_size: AtLeastOne = 1
    max_num_seqs: AtLeastOne | None = None
    max_lora_rank: LoraRank | None = None
    enforce_eager: bool | None = None

    def engine_arguments(self, *, model_dtype: str, cpu: bool) -> dict[str, Any]:
        """Return vLLM's engine arguments, by vLLM's names: keywords of ``vllm.LLM``, and with dashes the server's
        flags.

        Log-probs are those of the distribution that was drawn from, of any number of tokens; the model's own generation
        config has no say; prompts that begin alike share their cache.

        Args:
            model_dtype: The policy's type, used where ``dtype`` is None.
            cpu: True where vLLM runs on a CPU.
        """
        cache = _CPU_CACHE_GIB if self.kv_cache_gib is None and cpu else self.kv_cache_gib
        arguments: dict[str, Any] = {
            "dtype": self.dtype or model_dtype,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if cache is None else int(cache * _GIB),
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": True,
            # A prompt that is cut over two steps rewinds its seeded generator, which a CPU's cannot: vLLM would die.
            "enable_chunked_prefill": False if cpu else None,
            # Pixels are normalised as the policy's are. Inside the model, vLLM does it by buffers that no policy sends,
            # and an engine that starts without weights fills those with noise.
            "mm_device_do_normalize": False,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "generation_config": "vllm",
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
        }
        if self.max_lora_rank is not None:
            room = next(rank for rank in LORA_RANKS if rank >= self.max_lora_rank)
            arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
        return {name: value for name, value in arguments.items() if value is not None}


def model_arguments(model: LanguageModel) -> dict[str, Any]:
    """Return a vLLM server's arguments for the files of a model's description, by vLLM's names. Reads the config, no
    weights.

    Raises:
        ConfigError: no causal language model, or the policy's vocabulary outgrows the files.
        StorageError: the folder holds no safetensors; nothing else is read.
    """
    if isinstance(model, LoadedModel):
        raise ConfigError(
            "A vLLM engine reads the policy's files, but model is an object: save it and its tokenizer with "
            "save_pretrained(folder), and set model to the folder."
        )
    check_causal(model.name, model.config)
    hub_files.refuse_pickle("model.name", model.path, "")
    unused = model.config_and_kwargs[1]
    rows, tokens = model.config.get_text_config().vocab_size, model.new_tokens if model.chat_template else ()
    if tokens and max(tokens) >= rows:
        raise ConfigError(
            f"model.chat_template={model.chat_template!r} brings tokens up to id {max(tokens)}, and the files of "
            f"{model.name!r} have {rows} embeddings: an engine that reads them would lack the new ones. Save the model "
            "with its new tokens once (save_pretrained of LanguageModel.load() and of its tokenizer), and give that "
            "folder as model.name."
        )
    arguments: dict[str, Any] = {
        "model": model.path,
        "load_format": "safetensors",
        "trust_remote_code": model.trust_remote_code,
        **image_route(model),
    }
    if model.revision is not None:
        arguments |= dict.fromkeys(("revision", "tokenizer_revision", "code_revision"), model.revision)
    overrides = {name: value for name, value in model.init_kwargs.items() if name not in unused}
    return arguments | ({"hf_overrides": overrides} if overrides else {})


def image_route(model: LanguageModel) -> dict[str, Any]:
    """Return the flags by which a server takes images beside token ids; none for a policy over text."""
    return {"enable_scale_out": True} if model.sees else {}


def model_dtype(model: LanguageModel) -> str:
    """Return the type of a model's weights: `model.dtype`, or for "auto" that of its files by their config."""
    if model.dtype != "auto":
        return model.dtype
    return str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")


def adapter_rank(model: LanguageModel) -> int | None:
    """Return the highest rank of the policy's LoRA adapter where vLLM can run it beside the base, by the description
    alone; else None. `lit_rl.models.engine_weights.adapter_only` asks the policy itself."""
    if model.lora is not None:
        return None if model.new_tokens else model.lora.engine_rank
    if model.adapter is None:
        return None
    from peft import PeftConfig

    path = hub_files.resolve("model.adapter", model.adapter)
    with hub_files.reading("model.adapter", model.adapter, path):
        config: Any = PeftConfig.from_pretrained(path)
    if getattr(config, "use_dora", False) or getattr(config, "modules_to_save", None) or not getattr(config, "r", 0):
        return None
    return max([config.r, *(config.rank_pattern or {}).values()])


# ------------------------------------------------------------------ environment and files

IN_PROCESS: Mapping[str, str] = MappingProxyType({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
"""Environment of an engine in this process: its worker is an object here, so that tensors reach it without pickling,
and its log is not mixed into the run's."""

SERVER: Mapping[str, str] = MappingProxyType(
    {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONUNBUFFERED": "1"}
)
"""Environment of a server: the routes that update weights, pause and reset caches, and those that change adapters."""


def engine_environment(cpu: bool) -> dict[str, str]:
    """Return the environment variables of every process that runs vLLM, beside `IN_PROCESS` or `SERVER`.

    Usage statistics are off. On a CPU nothing is compiled: a request for log-probs would start a C++ compiler, which
    takes longer than most rollouts.
    """
    always = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return always | ({"TORCHDYNAMO_DISABLE": "1"} if cpu else {})


def runs_on_cpu() -> bool:
    """Tell whether the installed vLLM is a build for the CPU, as vLLM itself does: by the name of its package."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:  # the package of the CPU build is called vllm-cpu
        return True


def write_model_files(policy: nn.Module, model: LanguageModel, folder: str | Path) -> None:
    """Write config, tokenizer and processor of the plain model behind the policy; the weights are sent.

    They are the policy's own, not its files': with a resized vocabulary and config overrides.
    """
    base: Any = base_of(policy)
    config = copy.deepcopy(base.config)
    # Sharding puts a class of its own in front of the model's.
    config.architectures = [next(kind.__name__ for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))]
    if hasattr(config, "quantization_config"):  # the engine holds whole weights
        del config.quantization_config
    # Some of vLLM's models over images ask the config of the text whether its head is the embedding.
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings
    config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    if model.processor is not None:
        model.processor.processor.save_pretrained(folder)


# ------------------------------------------------------------------ key of a server

API_KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable of the key, for the server and for the training."""
OPEN_ROUTES = ("/health",)
"""Routes without a key: they tell whether the server is there."""

Scope = MutableMapping[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]


def api_key() -> str:
    """Return the key of the environment; empty where there is none."""
    return os.environ.get(API_KEY_VARIABLE, "").strip()


class APIKeyMiddleware:
    """ASGI middleware (`--middleware` of vLLM's server): 401 for a request without `Authorization: Bearer KEY`.

    vLLM's own guards completions, and not the routes that replace weights.

    Args:
        app: The guarded application.

    Raises:
        RuntimeError: there is no key.
    """

    def __init__(self, app: App) -> None:
        if not api_key():
            raise RuntimeError(f"{API_KEY_VARIABLE} is not set.")
        self._app, self._expected = app, f"Bearer {api_key()}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        free = scope["type"] == "lifespan" or scope["path"] in OPEN_ROUTES
        keys = [] if free else [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if free or (len(keys) == 1 and hmac.compare_digest(keys[0], self._expected)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": f"Unauthorized: this server asks for the key of {API_KEY_VARIABLE}."}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
