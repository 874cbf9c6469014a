"""Engine arguments: plain data, checked once, before anything is allocated."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nanovllm.errors import ConfigError, quoted
from nanovllm.formats.hub import find_directories, is_gguf
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS, own_arguments

# More than any machine has, and small enough for integer tensors.
MOST_COUNT = 2**31 - 1  # tokens, sequences, blocks
MOST_GIB = 2**30

MIN_BLOCK_SIZE = 16
MIN_GPU_BLOCKS = 4  # always enough for a ring that loads, attends and stores at the same time

DEVICES = ("cpu", "cuda")
FLAGS = (
    "enable_cpu_offload",
    "cpu_attention",
    "enable_prefix_caching",
    "enforce_eager",
    "trust_remote_code",
    "skip_tokenizer_init",
    "enable_lora",
)
DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
EXECUTOR_BACKENDS = ("uni", "mp", "external_launcher")
PreemptionMode = Literal["recompute", "swap"]
PREEMPTION_MODES: tuple[str, ...] = get_args(PreemptionMode)
# Arguments whose None stands for the default, as in vLLM.
NONE_IS_DEFAULT = (
    "seed",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "hf_overrides",
    "override_generation_config",
    "distributed_timeout_seconds",
    *ENGINE_ALIASES,
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The arguments of `LLM(model, **engine_args)`.

    KV memory is counted in blocks of `kvcache_block_size` tokens over all layers.

    num_gpu_blocks: the KV blocks of the device, ring slots and resident blocks together. On the CPU, the device is a
        bounded arena. -1 sizes it from memory. With offload, layer-by-layer prefill takes a layer buffer on top.
    num_cpu_blocks: the host pool, used with `enable_cpu_offload`. -1 sizes it from memory.
    kv_cache_memory_bytes: all KV memory of the device in bytes, for each rank: as many blocks as fit it next to the
        layer buffer. Instead of num_gpu_blocks.
    kv_offloading_size: the host pool in GiB, of all ranks together. Turns enable_cpu_offload on. Instead of
        num_cpu_blocks.
    kv_cache_dtype: "auto" stores K and V in the model's dtype; "int8" and "fp8" (also "fp8_e4m3") in one byte an
        element, with an fp32 scale for each token and KV head: `ops.kv_quantization` has the formula.
    kvcache_block_size: None means 256 without offload; with offload `kvcache.block_size` picks from 256 to 4096.
    cpu_attention: in decode steps, the CPU attends to a share of the host blocks while the others are copied to the
        device. Only used with offload.
    max_logprobs: the most logprobs and prompt_logprobs that a request may ask for; -1 for no limit.
    long_prefill_token_threshold: the most tokens of one prompt in a step; 0 for no limit.
    preemption_mode: "swap" or "recompute" for all requests. None swaps requests with several sequences and recomputes
        the others.
    swap_space: GiB of host memory for swapped blocks. None takes up to 4 (vLLM's default), at most half of the host
        memory that is left, and never more than the KV cache holds.
    batch_invariant: None computes logits that do not depend on the batch if there are kernels for that, True refuses to
        start without such kernels, and False takes faster kernels if there are any.
    enforce_eager: launch decode steps kernel by kernel instead of replaying CUDA graphs.
    tensor_parallel_size: ranks that share every layer, each on its own device. Sizes of memory are each rank's.
    distributed_executor_backend: "mp" starts the ranks as processes of this machine, which is what None does;
        "external_launcher" uses those that torchrun has started, on one machine or several.
    distributed_timeout_seconds: a rank that is so far behind the others has failed, which ends the engine.
    trace: file for a timeline of all copies and kernels, written when the engine is closed.
    quantization: the method that the checkpoint must have, such as "gptq"; None takes whatever its config says.
    trust_remote_code: True is accepted with a warning for models that need no code of their own. Code in a model
        directory is never run.
    tokenizer: a directory with the tokenizer files; None takes the model's. skip_tokenizer_init: no tokenizer at all;
        prompts are token ids, and outputs have no text.
    hf_overrides: fields that replace those of config.json. None is JSON's null; a field that the model family does not
        read may be null.
    generation_config: where the default sampling parameters come from: "auto" is the model directory, "vllm" is
        nowhere, and everything else is a directory. override_generation_config: fields that replace those found there.
    served_model_name: the model's name in metrics, or a list whose first name that is; None takes `model` as given.
    enable_lora: requests may name LoRA adapters of a rank up to max_lora_rank. max_loras: adapters on the device, so
        the most that running requests use. max_cpu_loras: adapters in host memory, at least max_loras, which is the
        default. Memory for all of them is set aside at the start.
    revision, tokenizer_revision, download_dir, hf_token: of models that are named as on the Hugging Face hub; see
        `nanovllm.formats.hub.find_directory`.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    kvcache_block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_cpu_offload: bool = False
    cpu_attention: bool = True
    num_gpu_blocks: int = -1
    num_cpu_blocks: int = -1
    kv_cache_memory_bytes: int | None = None
    kv_offloading_size: float | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    max_logprobs: int = 20
    long_prefill_token_threshold: int = 0
    preemption_mode: PreemptionMode | None = None
    swap_space: float | None = None
    load_format: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    batch_invariant: bool | None = None
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    distributed_timeout_seconds: float = 60.0
    trace: str | Path | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    served_model_name: str | Sequence[str] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_token: str | None = None

    def __post_init__(self) -> None:
        for name, directory in (("model", self.model), ("tokenizer", self.tokenizer)):
            rule = "must be a directory in Hugging Face format or a GGUF file: give the path of a local one"
            local = directory is None or _is_dir(directory) or is_gguf(directory)
            _require(local, name, rule, directory)
        if self.kv_offloading_size is not None and self.enable_cpu_offload is False:
            object.__setattr__(self, "enable_cpu_offload", True)  # as in vLLM
        for name in FLAGS:
            _require(isinstance(getattr(self, name), bool), name, "must be True or False", getattr(self, name))
        invariant = self.batch_invariant
        is_option = invariant is None or isinstance(invariant, bool)
        _require(is_option, "batch_invariant", "must be None, True or False", invariant)
        _require_choice("device", self.device, (None, *DEVICES))
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _require_choice("load_format", self.load_format, LOAD_FORMATS)
        _require_choice("preemption_mode", self.preemption_mode, (None, *PREEMPTION_MODES))
        method = self.quantization
        _require(method is None or isinstance(method, str), "quantization", "must be None or text", method)
        self._check_sizes()
        self._check_blocks()
        self._check_bytes()
        self._check_lora()
        if self.trace is not None:
            possible = isinstance(self.trace, str | Path) and _can_be_file(Path(self.trace))
            _require(possible, "trace", "must be a file in a directory that exists", self.trace)
        self._check_model_files()
        self._check_ranks()

    @property
    def model_name(self) -> str:
        """The model's name for users."""
        if self.served_model_name is None:
            return self.model
        return self.served_model_name if isinstance(self.served_model_name, str) else self.served_model_name[0]

    def _check_model_files(self) -> None:
        for name in ("hf_overrides", "override_generation_config"):
            value = getattr(self, name)
            holds = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            _require(holds, name, "must be a dict of fields and their values", value)
        source = self.generation_config
        rule = 'must be "auto", "vllm" (no recommendations) or a directory with a generation_config.json'
        found = source in ("auto", "vllm") or (_is_dir(source) and (Path(source) / "generation_config.json").is_file())
        _require(found, "generation_config", rule, source)
        names = self.served_model_name
        listed = isinstance(names, Sequence) and len(names) > 0 and all(isinstance(name, str) for name in names)
        _require(names is None or listed, "served_model_name", "must be None, a name or a list of names", names)
        for name in ("revision", "tokenizer_revision", "download_dir", "hf_token"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), name, "must be None or text", value)

    def _check_sizes(self) -> None:
        if self.max_model_len is not None:
            _require_int("max_model_len", self.max_model_len, 1)
        _require_int("max_num_seqs", self.max_num_seqs, 1)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _require_int("seed", self.seed, 0, most=2**63 - 1)
        if self.max_logprobs != -1:
            _require_int("max_logprobs", self.max_logprobs, 0, "or -1 for no limit")
        _require_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        share, swap = self.gpu_memory_utilization, self.swap_space
        rule = "must be a number above 0 and at most 1"
        _require(_is_number(share) and 0.0 < share <= 1.0, "gpu_memory_utilization", rule, share)
        if swap is not None:
            rule = "must be None or a number of GiB of at least 0"
            _require(_is_number(swap) and 0.0 <= swap < math.inf, "swap_space", rule, swap)
            _require(swap <= MOST_GIB, "swap_space", f"must be at most {MOST_GIB:,} GiB", swap)

    def _check_ranks(self) -> None:
        backend, seconds = self.distributed_executor_backend, self.distributed_timeout_seconds
        _require_choice("distributed_executor_backend", backend, (None, *EXECUTOR_BACKENDS))
        if self.tensor_parallel_size > 1:
            rule = f"runs one rank, and tensor_parallel_size is {self.tensor_parallel_size}: leave it out"
            _require(backend != "uni", "distributed_executor_backend", rule, backend)
        else:
            rule = "needs tensor_parallel_size above 1: torchrun has started several ranks"
            _require(backend != "external_launcher", "distributed_executor_backend", rule, backend)
        rule = "must be a number of seconds above 0"
        _require(_is_number(seconds) and 0 < seconds < math.inf, "distributed_timeout_seconds", rule, seconds)

    def _check_bytes(self) -> None:
        """Sizes of KV memory that are given in bytes and GiB. `kvcache.sizing` says whether they hold a block."""
        size, gib = self.kv_cache_memory_bytes, self.kv_offloading_size
        if size is not None:
            _require_int("kv_cache_memory_bytes", size, 1, "or None to size it from memory", most=MOST_GIB * 2**30)
        if gib is not None:
            rule = f"must be None or a number of GiB above 0 and at most {MOST_GIB:,}"
            _require(_is_number(gib) and 0.0 < gib <= MOST_GIB, "kv_offloading_size", rule, gib)
        for name, blocks in (("kv_cache_memory_bytes", "num_gpu_blocks"), ("kv_offloading_size", "num_cpu_blocks")):
            value, count = getattr(self, name), getattr(self, blocks)
            rule = f"{blocks}={quoted(count)} sizes the same memory in blocks: give only one of them"
            _require(value is None or count == -1, name, rule, value)

    def _check_blocks(self) -> None:
        if self.kvcache_block_size is not None:
            _require_int("kvcache_block_size", self.kvcache_block_size, MIN_BLOCK_SIZE)
        # With offload, a smaller ring may be enough, depending on the model: see `kvcache.sizing`.
        fewest = 1 if self.enable_cpu_offload is True else MIN_GPU_BLOCKS
        for name, minimum in (("num_gpu_blocks", fewest), ("num_cpu_blocks", 0)):
            value = getattr(self, name)
            if value != -1:
                _require_int(name, value, minimum, "or -1 to size it from memory")
        if not self.enable_cpu_offload:
            rule = "needs enable_cpu_offload=True: without offload there is no host pool"
            _require(self.num_cpu_blocks <= 0, "num_cpu_blocks", rule, self.num_cpu_blocks)
            rule = "needs enable_cpu_offload=True: without offload no KV block is on the host, so leave it out"
            _require(self.cpu_attention, "cpu_attention", rule, self.cpu_attention)

    def _check_lora(self) -> None:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            value, default = getattr(self, name), getattr(EngineConfig, name)
            rule = "needs enable_lora=True: without it requests have no adapters"
            _require(self.enable_lora or value == default, name, rule, value)
            if value is not None:
                _require_int(name, value, 1)
        rule = f"must be at least max_loras={self.max_loras}: each adapter on the device is in host memory too"
        _require(self.num_cpu_loras >= self.max_loras, "max_cpu_loras", rule, self.max_cpu_loras)

    @property
    def num_cpu_loras(self) -> int:
        """Adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


def engine_config(model: str | Path, engine_args: Mapping[str, Any]) -> EngineConfig:
    """The checked configuration, from the engine's own arguments and from vLLM's.

    Names of the hub become directories. vLLM's other names for an argument or a value are resolved; `vllm_names` says
    which arguments of vLLM's are accepted without being this engine's. Raises ConfigError.
    """
    own = {f.name for f in fields(EngineConfig)} - {"model"}
    given = {name: value for name, value in engine_args.items() if value is not None or name not in NONE_IS_DEFAULT}
    given = own_arguments("engine argument", given, own | ENGINE_ALIASES.keys(), ENGINE_ARGUMENTS, ConfigError)
    for alias, name in ENGINE_ALIASES.items():
        _rename(given, alias, name)
    _resolve_values(given)
    return EngineConfig(**find_directories(str(model), given))


def _rename(given: dict[str, Any], alias: str, name: str) -> None:
    """Move the value of vLLM's name to the engine's own. Raises ConfigError if both are given and differ."""
    if alias in given:
        value, default = given.pop(alias), getattr(EngineConfig, name)
        rule = f"is another name of {name}, which is {quoted(given.get(name))}: give only one of them"
        _require(given.get(name, default) in (default, value), alias, rule, value)
        given[name] = value


def _resolve_values(given: dict[str, Any]) -> None:
    """Replace vLLM's other spellings of a value."""
    dtype = given.get("dtype")
    if type(dtype).__module__ == "torch":  # torch.float16 itself
        given["dtype"] = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, str):
        given["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
    if given.get("max_model_len") == -1:  # what fits
        given["max_model_len"] = None
    if given.get("hf_token") is True:  # the stored token, which is taken without being asked for
        given["hf_token"] = None
    overrides = given.get("hf_overrides")
    if isinstance(overrides, Mapping) and "max_model_len" in overrides:  # as vLLM's example of context extension has it
        given["hf_overrides"] = {name: value for name, value in overrides.items() if name != "max_model_len"}
        longest = overrides["max_model_len"]
        rule = f"hf_overrides has another max_model_len, {quoted(longest)}: give only one of them"
        _require(given.get("max_model_len") in (None, longest), "max_model_len", rule, given.get("max_model_len"))
        given["max_model_len"] = longest


def _is_dir(path: object) -> bool:
    try:
        return isinstance(path, str | Path) and Path(path).is_dir()
    except (OSError, ValueError):  # such as a name that is too long
        return False


def _can_be_file(path: Path) -> bool:
    try:
        return path.parent.is_dir() and not stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{name}={quoted(value)}: {rule}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_int(name: str, value: object, minimum: int, alternative: str = "", most: int = MOST_COUNT) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    rule = f"must be a whole number of at least {minimum} {alternative}".rstrip()
    _require(is_int and value >= minimum, name, rule, value)  # type: ignore[operator]
    _require(value <= most, name, f"must be at most {most:,}", value)  # type: ignore[operator]


def _require_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    _require(value in choices, name, f"must be one of {', '.join(str(c) for c in choices)}", value)
