"""Engine arguments: plain data, checked once, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nanovllm.config_rules import (
    FIELDS,
    FROM_MEMORY,
    GENERATION,
    GIB,
    GIB_OR_NONE,
    GIB_OR_SIZE,
    HOST_WEIGHT_BYTES,
    KV_BYTES,
    MODEL,
    MOST_GIB,
    MOST_SECONDS,
    SIZES,
    WEIGHT_BYTES,
    can_be_dir,
    can_be_file,
    is_dir,
    is_fields,
    is_generation_config,
    is_names,
    is_weights_size,
)
from nanovllm.errors import ConfigError, quoted
from nanovllm.formats.hub import find_directories, is_gguf
from nanovllm.rules import (
    FLAG,
    TEXT_OR_NONE,
    Rule,
    Share,
    argument,
    check_fields,
    check_together,
    num_bytes,
    number,
    one_of,
    refusal,
    share,
    size,
    whole,
)
from nanovllm.speculative_config import speculative_config
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS, own_arguments

MIN_BLOCK_SIZE = 16
STREAMS = "needs weights_memory_bytes or enable_cpu_offload=True: without them all weights stay on the device"
MIN_GPU_BLOCKS = 4  # always enough for a ring that loads, attends and stores at the same time

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
PreemptionMode = Literal["recompute", "swap"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The arguments of `LLM(model, **engine_args)`.

    KV memory is counted in blocks of `kvcache_block_size` tokens over all layers. Of some arguments there is more to
    say than their meaning below:

    num_gpu_blocks: ring slots and resident blocks together. On the CPU, the device is a bounded arena. With offload,
        layer-by-layer prefill takes a layer buffer on top.
    kvcache_block_size: where layers have K and V of several sizes, tokens in the smallest blocks.
    kv_cache_memory_bytes: for each rank, as many blocks as fit it next to the layer buffer. A share is one of the KV
        cache of a sequence of max_model_len tokens, or of as many as it names: "10% of 32K". Without
        kvcache_block_size, blocks are small enough that several fit.
    kv_offloading_size: of all ranks together.
    weights_memory_bytes: of each rank. It covers all weights, with two slots for streamed layers. None keeps them all
        on the device; with enable_cpu_offload, as many as leave room for a step and for KV blocks.
    host_weights_bytes: of each rank, with the places for what is read from weights_dir, in which each rank has a file
        of its own without a name. It is written when the model is loaded.
    kv_cache_dtype: "int8" and "fp8" take one byte an element, with an fp32 scale for each token and KV head:
        `ops.kv_quantization` has the formula.
    cpu_attention: in decode steps, the CPU attends to a share of the host blocks while the others are copied to the
        device. Only used with offload.
    preemption_mode: None swaps requests with several sequences and recomputes the others.
    kv_cache_dir: docs/kv-on-disk.md. kv_cache_dir_space: of all engines and models that use the directory.
    swap_space: None takes up to 4 (vLLM's default), at most half of the host memory that is left, never more than the
        KV cache holds, and than two sequences of max_model_len tokens unless preemption_mode="swap".
    batch_invariant: None computes logits that do not depend on the batch if there are kernels for that, True refuses to
        start without such kernels, and False takes faster kernels if there are any.
    enforce_eager: decode steps are launched kernel by kernel.
    tensor_parallel_size: sizes of memory are each rank's.
    distributed_executor_backend: "mp" starts the ranks as processes of this machine, which is what None does;
        "external_launcher" uses those that torchrun has started, on one machine or several.
    trace: written when the engine is closed.
    trust_remote_code: True is accepted with a warning for models that need no code of their own.
    tokenizer: None takes the model's.
    hf_overrides: None is JSON's null; a field that the model family does not read may be null.
    served_model_name: text, or a list whose first name is the model's in metrics; None takes `model` as given.
    speculative_config: None computes one token of a sequence in a pass; docs/speculation.md has the fields.
    enable_lora: memory for all adapters is set aside at the start.
    max_loras: the most that running requests use. max_cpu_loras: at least max_loras.
    revision, tokenizer_revision, download_dir, hf_token: see `nanovllm.formats.hub.find_directory`.
    """

    model: str = argument(
        MISSING,
        Rule(lambda value: is_dir(value) or is_gguf(value), MODEL),
        "a directory in Hugging Face format, its name on the hub, or a GGUF file",
    )
    device: str | None = argument(None, one_of(None, *DEVICES), "cpu or cuda (default: cuda if available)")
    dtype: str = argument(
        "auto", one_of(*DTYPES), "of the model: bfloat16, float16 or float32; auto is the checkpoint's"
    )
    kv_cache_dtype: str = argument(
        "auto",
        one_of(*KV_CACHE_DTYPES),
        "of K and V: auto is the model's dtype; fp8 (or fp8_e4m3) and int8 halve 16-bit K and V",
    )
    max_model_len: int | None = argument(
        None,
        whole(1, also=(None,)),
        "longest sequence in tokens; none: what the model's positions and the KV cache allow",
    )
    max_num_seqs: int = argument(512, whole(1), "sequences in a step")
    max_num_batched_tokens: int = argument(16384, whole(1), "tokens in a step; longer prompts are computed in chunks")
    kvcache_block_size: int | None = argument(
        None, whole(MIN_BLOCK_SIZE, also=(None,)), "tokens in a KV block (default: 256, under offload up to 4096)"
    )
    gpu_memory_utilization: float = argument(
        0.9,
        number("must be a number above 0 and at most 1", lambda share: 0 < share <= 1),
        "share of the memory that sizing from memory may use",
    )
    enable_cpu_offload: bool = argument(False, FLAG, "extend the KV cache into host memory")
    cpu_attention: bool = argument(True, FLAG, "let the CPU attend to blocks in host memory in decode steps")
    num_gpu_blocks: int = argument(
        -1,
        whole(1, FROM_MEMORY, also=(-1,)),
        "KV blocks of the device; -1: from memory, on the CPU up to 4 GiB or a full sequence",
    )
    num_cpu_blocks: int = argument(
        -1, whole(0, FROM_MEMORY, also=(-1,)), "KV memory of the host in blocks; -1: from memory"
    )
    kv_cache_memory_bytes: int | str | None = argument(
        None,
        size(KV_BYTES, 1, MOST_GIB * GIB, shares=True),
        "all KV memory of the device instead of num_gpu_blocks: bytes, such as 20G, or a share, such as 10%, which "
        "turns offload on",
    )
    kv_offloading_size: float | str | None = argument(
        None,
        size(GIB_OR_SIZE, GIB, MOST_GIB * GIB),
        "KV memory of the host in GiB, or such as 500M, instead of num_cpu_blocks; turns offload on",
    )
    weights_memory_bytes: int | str | None = argument(
        None,
        Rule(is_weights_size, WEIGHT_BYTES),
        "device memory for weights: bytes, such as 20G, or a share of them, such as 25%; layers for which it is too "
        "little stream from host memory",
    )
    host_weights_bytes: int | str | None = argument(
        None,
        Rule(is_weights_size, HOST_WEIGHT_BYTES),
        "host memory for weights that stream: bytes, such as 40G, or a share of them, such as 50%; the rest is read "
        "from weights_dir; none: what the host has room for",
    )
    weights_dir: str | Path | None = argument(
        None,
        Rule(can_be_dir, "must be None or a directory, or a path where one can be made"),
        "directory on a local disk for weights that stream and are too large for the host; they are removed at the end",
    )
    host_products: bool = argument(
        True,
        FLAG,
        "in steps of few rows multiply with weights in host memory where they lie; False: copy all to the device, "
        "which on a GPU keeps bits for every weights_memory_bytes",
    )
    enable_prefix_caching: bool = argument(True, FLAG, "reuse the KV blocks of prefixes that were computed before")
    seed: int = argument(0, whole(0, most=2**63 - 1), "of requests without a seed")
    max_logprobs: int = argument(
        20,
        whole(0, " or -1 for no limit", also=(-1,)),
        "most logprobs that a request may ask for; -1: no limit",
    )
    long_prefill_token_threshold: int = argument(0, whole(0), "most tokens of one prompt in a step; 0: no cap")
    preemption_mode: PreemptionMode | None = argument(
        None,
        one_of(None, *get_args(PreemptionMode)),
        "swap or recompute; else swap for requests of several sequences",
    )
    swap_space: float | str | None = argument(
        None,
        size(GIB_OR_NONE, GIB, MOST_GIB * GIB, least=0),
        "GiB of host memory for swapped KV blocks, or such as 500M; none: from memory",
    )
    kv_cache_dir: str | Path | None = argument(
        None,
        Rule(can_be_dir, "must be None or a directory, or a path where one can be made"),
        "directory where KV blocks of prompts outlive the engine, and are found by later ones",
    )
    kv_cache_dir_space: float | str | None = argument(
        None,
        size(GIB_OR_SIZE, GIB, MOST_GIB * GIB),
        "GiB that kv_cache_dir may take, or such as 500M; none: half of what is free there",
    )
    load_format: str = argument(
        "auto", one_of(*LOAD_FORMATS), "safetensors, gguf, or dummy for random weights from a config alone"
    )
    quantization: str | None = argument(
        None,
        TEXT_OR_NONE,
        "refuse checkpoints that are not stored so, such as gptq; which it is, the config says anyway",
    )
    enforce_eager: bool = argument(False, FLAG, "no CUDA graphs")
    batch_invariant: bool | None = argument(
        None,
        one_of(None, True, False),
        "require logits that do not depend on the batch; without it, kernels may be faster",
    )
    tensor_parallel_size: int = argument(1, whole(1), "ranks that share every layer, each on a device of its own")
    distributed_executor_backend: str | None = argument(
        None,
        one_of(None, "uni", "mp", "external_launcher"),
        "external_launcher: torchrun has started the ranks; else they are started here",
    )
    distributed_timeout_seconds: float = argument(
        60.0,
        number(
            f"must be a number of seconds above 0 and at most {MOST_SECONDS:,}",
            lambda seconds: 0 < seconds <= MOST_SECONDS,
        ),
        "a rank that is so far behind the others ends the engine",
    )
    trace: str | Path | None = argument(
        None,
        Rule(lambda path: path is None or can_be_file(path), "must be a file in a directory that exists"),
        "file for a timeline of steps, kernels and copies, by torch's profiler",
    )
    trust_remote_code: bool = argument(
        False, FLAG, "accepted for models that need no code of their own, which is never run"
    )
    tokenizer: str | None = argument(
        None,
        Rule(lambda value: value is None or is_dir(value) or is_gguf(value), MODEL),
        "directory or hub name of another tokenizer",
    )
    skip_tokenizer_init: bool = argument(False, FLAG, "no tokenizer: prompts are token ids, and outputs have no text")
    hf_overrides: Mapping[str, Any] = argument(
        {}, FIELDS, "fields that replace those of config.json, such as another RoPE"
    )
    generation_config: str = argument(
        "auto",
        Rule(is_generation_config, GENERATION),
        "auto, vllm (no recommended sampling parameters) or a directory",
    )
    override_generation_config: Mapping[str, Any] = argument(
        {}, FIELDS, "sampling parameters that replace the recommended ones"
    )
    served_model_name: str | Sequence[str] | None = argument(
        None,
        Rule(is_names, "must be None, a name or a list of names"),
        "the model's name in metrics and in requests to the server",
    )
    enable_lora: bool = argument(False, FLAG, "let requests use LoRA adapters")
    max_loras: int = argument(1, whole(1), "adapters on the device")
    max_lora_rank: int = argument(16, whole(1), "largest rank of an adapter")
    max_cpu_loras: int | None = argument(None, whole(1, also=(None,)), "adapters in host memory; by default max_loras")
    speculative_config: Mapping[str, Any] | None = argument(
        None,
        Rule(lambda value: value is None or is_fields(value), "must be None or a dict of fields and their values"),
        'several tokens in a pass, such as {"method": "ngram", "num_speculative_tokens": 8}; outputs do not change',
    )
    revision: str | None = argument(None, TEXT_OR_NONE, "branch, tag or commit of a hub model")
    tokenizer_revision: str | None = argument(None, TEXT_OR_NONE, "the same for the tokenizer")
    download_dir: str | None = argument(None, TEXT_OR_NONE, "cache directory of hub models")
    hf_token: str | None = argument(None, TEXT_OR_NONE, "access token of the hub")

    def __post_init__(self) -> None:
        offloads = self.kv_offloading_size is not None or self.kv_share is not None
        if offloads and self.enable_cpu_offload is False:
            object.__setattr__(self, "enable_cpu_offload", True)  # as in vLLM
        check_fields(self, ConfigError)
        if self.speculative_config is not None:
            speculative_config(self.speculative_config)
        check_together(self, self._contradictions(), ConfigError)

    def _contradictions(self) -> Iterator[tuple[str, bool, str]]:
        """What is wrong with arguments that are right by themselves: (the argument, whether it is wrong, the rule)."""
        offload = self.enable_cpu_offload
        ranks = self.tensor_parallel_size
        backend = self.distributed_executor_backend
        # With offload, a smaller ring may be enough, depending on the model: see `memory.sizing`.
        too_few = 0 < self.num_gpu_blocks < MIN_GPU_BLOCKS and not offload
        yield "num_gpu_blocks", too_few, f"must be a whole number of at least {MIN_GPU_BLOCKS}{FROM_MEMORY}"
        needs = "needs enable_cpu_offload=True: without offload"
        yield "num_cpu_blocks", self.num_cpu_blocks > 0 and not offload, f"{needs} there is no host pool"
        unused = not self.cpu_attention and not offload
        yield "cpu_attention", unused, f"{needs} no KV block is on the host, so leave it out"
        for name, blocks in (("kv_cache_memory_bytes", "num_gpu_blocks"), ("kv_offloading_size", "num_cpu_blocks")):
            is_twice = getattr(self, name) is not None and getattr(self, blocks) != -1
            same = f"{blocks}={quoted(getattr(self, blocks))} sizes the same memory in blocks: give only one of them"
            yield name, is_twice, same
        streams = offload or self.weights_memory_bytes is not None
        yield "host_weights_bytes", self.host_weights_bytes is not None and not streams, STREAMS
        yield "weights_dir", self.weights_dir is not None and not streams, STREAMS
        stored = self.kv_cache_dir is not None
        yield "kv_cache_dir_space", self.kv_cache_dir_space is not None and not stored, "needs kv_cache_dir"
        cached = "needs enable_prefix_caching=True: what is read from the directory is found through the prefix cache"
        yield "kv_cache_dir", stored and not self.enable_prefix_caching, cached
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            is_unused = not self.enable_lora and getattr(self, name) != getattr(EngineConfig, name)
            yield name, is_unused, "needs enable_lora=True: without it requests have no adapters"
        both = f"must be at least max_loras={self.max_loras}: each adapter on the device is in host memory too"
        yield "max_cpu_loras", self.num_cpu_loras < self.max_loras, both
        one = f"runs one rank, and tensor_parallel_size is {ranks}: leave it out"
        yield "distributed_executor_backend", backend == "uni" and ranks > 1, one
        method = (self.speculative_config or {}).get("method")
        rule = f"method={method!r} is not supported with tensor_parallel_size={ranks}: use method='ngram' or one rank"
        yield "speculative_config", ranks > 1 and method not in (None, "ngram"), rule
        several = "needs tensor_parallel_size above 1: torchrun has started several ranks"
        yield "distributed_executor_backend", backend == "external_launcher" and ranks == 1, several

    @property
    def kv_share(self) -> Share | None:
        """The share that `kv_cache_memory_bytes` is; None if it is none. `memory.shares` makes it a number of bytes."""
        return share(self.kv_cache_memory_bytes)

    @property
    def weights_share(self) -> float | None:
        """The share that `weights_memory_bytes` is; None if it is none."""
        asked = share(self.weights_memory_bytes)
        return None if asked is None else asked.part

    @property
    def host_weights_share(self) -> float | None:
        """The share that `host_weights_bytes` is; None if it is none."""
        asked = share(self.host_weights_bytes)
        return None if asked is None else asked.part

    def num_bytes(self, name: str) -> int | None:
        """The bytes of one of SIZES; None if it is not given, or is a share."""
        return num_bytes(getattr(self, name), SIZES[name])

    @property
    def model_name(self) -> str:
        """The model's name for users."""
        if self.served_model_name is None:
            return self.model
        return self.served_model_name if isinstance(self.served_model_name, str) else self.served_model_name[0]

    @property
    def chunk(self) -> int:
        """Most tokens of one prompt in a step."""
        return longest_chunk(self.max_num_batched_tokens, self.long_prefill_token_threshold)

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafted tokens of a sequence in a step."""
        given = self.speculative_config
        return 0 if given is None else speculative_config(given).num_speculative_tokens

    @property
    def num_cpu_loras(self) -> int:
        """Adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


def longest_chunk(max_num_batched_tokens: int, long_prefill_token_threshold: int) -> int:
    """Most tokens of one prompt in a step; a threshold of 0 is none."""
    return min(max_num_batched_tokens, long_prefill_token_threshold or max_num_batched_tokens)


def engine_config(model: str | Path, engine_args: Mapping[str, Any]) -> EngineConfig:
    """The checked configuration, from the engine's own arguments and from vLLM's.

    Names of the hub become directories. vLLM's other names for an argument or a value are resolved; `vllm_names` says
    which arguments of vLLM's are accepted without an effect. Raises ConfigError.
    """
    rules: dict[str, Rule] = {
        field.name: field.metadata["rule"] for field in fields(EngineConfig) if field.name != "model"
    }
    known = rules.keys() | ENGINE_ALIASES.keys()
    given = own_arguments("engine argument", engine_args, known, ENGINE_ARGUMENTS, ConfigError)
    nones = [name for name, value in given.items() if value is None]
    for name in nones:  # stands for the default where it is no value of its own
        if name in ENGINE_ALIASES or not rules[name].holds(None):
            del given[name]
    for alias, name in ENGINE_ALIASES.items():
        if alias in given:
            value = given.pop(alias)
            default = getattr(EngineConfig, name)
            if given.get(name, default) not in (default, value):
                rule = f"is another name of {name}, which is {quoted(given[name])}: give only one of them"
                raise refusal(ConfigError, alias, value, rule)
            given[name] = value
    _resolve_values(given)
    return EngineConfig(**find_directories(str(model), given))


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
        if given.get("max_model_len") not in (None, longest):
            rule = f"hf_overrides has another max_model_len, {quoted(longest)}: give only one of them"
            raise refusal(ConfigError, "max_model_len", given["max_model_len"], rule)
        given["max_model_len"] = longest
