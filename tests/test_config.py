"""Engine arguments: the defaults of the API, and a sentence for everything that cannot be honoured."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError, quoted
from tools.arguments import DOCS, PAGES, page

# The keyword arguments of LLM(model, ...).
DEFAULTS = {
    "device": None,
    "dtype": "auto",
    "max_model_len": None,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 16384,
    "kvcache_block_size": None,
    "gpu_memory_utilization": 0.9,
    "enable_cpu_offload": False,
    "cpu_attention": True,
    "num_gpu_blocks": -1,
    "num_cpu_blocks": -1,
    "kv_cache_memory_bytes": None,
    "kv_offloading_size": None,
    "enable_prefix_caching": True,
    "seed": 0,
    "max_logprobs": 20,
    "long_prefill_token_threshold": 0,
    "preemption_mode": None,
    "swap_space": None,
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "quantization": None,
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "max_cpu_loras": None,
    "enforce_eager": False,
    "batch_invariant": None,
    "tensor_parallel_size": 1,
    "distributed_executor_backend": None,
    "distributed_timeout_seconds": 60.0,
    "trace": None,
    "trust_remote_code": False,
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "hf_overrides": {},
    "generation_config": "auto",
    "override_generation_config": {},
    "served_model_name": None,
    "revision": None,
    "tokenizer_revision": None,
    "download_dir": None,
    "hf_token": None,
}


def test_defaults(tmp_path: Path) -> None:
    config = engine_config(tmp_path, {})
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {"model": str(tmp_path), **DEFAULTS}


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("kvcache_blocksize", "kvcache_block_size"),
        ("max_seq_len", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("enable_offload", "enable_cpu_offload"),
        ("num_gpu_block", "num_gpu_blocks"),
        ("Seed", "seed"),
        ("tensor_parallel", "tensor_parallel_size"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_config(tmp_path, {name: 1})
    message = str(refusal.value)
    assert repr(name) in message
    assert f"did you mean {nearest!r}?" in message


def test_a_name_like_no_other_is_refused_with_all_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_config(tmp_path, {"zzz": 1})
    assert "'zzz'" in str(refusal.value) and all(name in str(refusal.value) for name in DEFAULTS)


def test_model_is_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    for path in (tmp_path / "absent", file, "Qwen/Qwen3-0.6B"):
        with pytest.raises(ConfigError, match="is not a directory") as refusal:
            engine_config(path, {})
        assert str(path) in str(refusal.value)


NOT_BOOLS: list[Any] = [0, 1, None, "True"]
NOT_INTS: list[Any] = [1.5, 8.0, "8", True, [8], math.nan]
FLAGS = (
    *("enable_cpu_offload", "cpu_attention", "enforce_eager", "enable_lora", "trust_remote_code"),
    "skip_tokenizer_init",
)
# field -> values that are refused
REFUSED: dict[str, list[Any]] = {
    "device": ["gpu", "cuda:0", "", 0],
    "dtype": ["int8", "fp16", None, "torch.float16"],
    "kv_cache_dtype": ["fp8_e5m2", "", None, 8],
    "load_format": ["pt", None, ""],
    "quantization": [4, True, ["awq"]],
    **{name: [0, -2, *NOT_INTS] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
    "kvcache_block_size": [15, 0, -1, *NOT_INTS],
    "gpu_memory_utilization": [0, -0.1, 1.01, 90, math.nan, "0.9", True],
    **{name: NOT_BOOLS for name in FLAGS},
    "enable_prefix_caching": [0, 1, "True"],
    "batch_invariant": [1, "yes", 0.5],
    "num_gpu_blocks": [0, 3, -2, None, *NOT_INTS],
    "num_cpu_blocks": [-2, None, *NOT_INTS],
    "seed": [-1, 2**63, *NOT_INTS],
    "long_prefill_token_threshold": [-1, None, *NOT_INTS],
    "preemption_mode": ["none", "", 0, True],
    "swap_space": [-1, -0.5, math.nan, math.inf, "4", True],
    "max_logprobs": [-2, None, *NOT_INTS],
    "tensor_parallel_size": [0, -1, None, *NOT_INTS],
    "distributed_executor_backend": ["ray", "", 0, True],
    "distributed_timeout_seconds": [0, -1, math.nan, math.inf, "60", True],
    **{name: [0, 2, "8"] for name in ("max_loras", "max_lora_rank", "max_cpu_loras")},
    "tokenizer": [5, True, ["a"]],
    "hf_overrides": [5, "rope", ["a"], {1: 2}, len],
    "generation_config": ["none", "", None, 5, "/no/such/directory"],
    "kv_cache_memory_bytes": [0, -1, 1.5],
    "kv_offloading_size": [0, -0.5, "1", True],
    "override_generation_config": [5, "top_p", ["a"], {1: 2}],
    "served_model_name": ["", [], 5, [5]],
    "revision": [],  # with a directory, any is refused
    "tokenizer_revision": [],
    "download_dir": [5, True],
    "hf_token": [5, False],
    "trace": ["", "/", "/no/such/directory/trace.json", 3, True],
}


def test_every_argument_has_a_rule() -> None:
    assert set(REFUSED) == set(DEFAULTS)


@pytest.mark.parametrize("field", REFUSED)
def test_invalid_values_are_refused_with_field_and_value(field: str, tmp_path: Path) -> None:
    for value in REFUSED[field]:
        with pytest.raises(ConfigError) as refusal:
            engine_config(tmp_path, {field: value})
        assert str(refusal.value).startswith(f"{field}={quoted(value)}: ")


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, r"='uni': runs one rank, and .* is 2"),
        ({"distributed_executor_backend": "external_launcher"}, r"needs tensor_parallel_size above 1"),
        ({"enable_lora": True, "max_loras": 0}, r"max_loras=0: must be"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, r"max_cpu_loras=3: must be at least max_loras=4"),
        ({"num_cpu_blocks": 8}, r"num_cpu_blocks=8: needs enable_cpu_offload=True"),
        ({"cpu_attention": False}, r"cpu_attention=False: needs enable_cpu_offload=True"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_config(tmp_path, arguments)


ACCEPTED: list[dict[str, Any]] = [
    {"device": "cpu", "dtype": "float32", "load_format": "dummy", "trace": "trace.json"},
    {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"kvcache_block_size": 16, "num_gpu_blocks": 4},
    {"kvcache_block_size": 17, "gpu_memory_utilization": 1},
    {"enable_cpu_offload": True, "num_cpu_blocks": 0, "gpu_memory_utilization": 0.01},
    {"enable_cpu_offload": True, "num_cpu_blocks": 10**6, "num_gpu_blocks": 10**6},
    {"enable_cpu_offload": True, "cpu_attention": False},
    {"max_logprobs": -1},
    {"max_logprobs": 0},
    {"num_cpu_blocks": 0, "seed": 2**63 - 1, "enforce_eager": True, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("arguments", ACCEPTED, ids=str)
def test_valid_values_are_kept(arguments: dict[str, Any], tmp_path: Path) -> None:
    config = engine_config(tmp_path, arguments)
    assert {name: getattr(config, name) for name in arguments} == arguments


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path))
    with pytest.raises(FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


# ---- vLLM's names and values


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": "float"}, "dtype", "float32"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"block_size": 16}, "kvcache_block_size", 16),
        ({"block_size": 16, "kvcache_block_size": 16}, "kvcache_block_size", 16),
        ({"num_gpu_blocks_override": 40}, "num_gpu_blocks", 40),
        ({"num_gpu_blocks_override": 40, "num_gpu_blocks": -1}, "num_gpu_blocks", 40),
        ({"max_model_len": -1}, "max_model_len", None),
        ({"max_num_seqs": None}, "max_num_seqs", 512),
        ({"enable_prefix_caching": None}, "enable_prefix_caching", True),
        ({"hf_overrides": None}, "hf_overrides", {}),
        ({"hf_overrides": {"a": 1, "max_model_len": 64}}, "hf_overrides", {"a": 1}),
        ({"hf_overrides": {"max_model_len": 64}}, "max_model_len", 64),
        ({"hf_overrides": {"max_model_len": 64}, "max_model_len": 64}, "max_model_len", 64),
        ({"hf_token": True}, "hf_token", None),
    ],
    ids=str,
)
def test_other_spellings_of_a_value(given: dict[str, Any], field: str, value: Any, tmp_path: Path) -> None:
    assert getattr(engine_config(tmp_path, given), field) == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"block_size": 16, "kvcache_block_size": 32}, "block_size=16: is another name of kvcache_block_size"),
        ({"block_size": 8}, "kvcache_block_size=8: must be"),
        ({"hf_overrides": {"max_model_len": 64}, "max_model_len": 32}, "max_model_len=32: hf_overrides has another"),
        ({"revision": "main"}, "revision='main': .* is a directory, which has no revisions"),
        ({"tokenizer_revision": "main"}, "tokenizer_revision='main': .* which has no revisions"),
        ({"tokenizer": "/no/such/directory"}, "tokenizer='/no/such/directory' is not a directory"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_config(tmp_path, given)


def test_none_stands_for_the_default_where_vllm_has_it(tmp_path: Path) -> None:
    given = dict.fromkeys(("seed", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size"))
    assert engine_config(tmp_path, given) == engine_config(tmp_path, {})


def test_a_hint_is_given_only_for_a_name_that_is_near(tmp_path: Path) -> None:
    for name in ("warp_factor", "kv_shape", "cache"):
        with pytest.raises(ConfigError) as refusal:
            engine_config(tmp_path, {name: 1})
        assert "did you mean" not in str(refusal.value), name


def test_kv_memory_in_bytes_is_checked_and_turns_offload_on(tmp_path: Path) -> None:
    config = engine_config(tmp_path, {"kv_cache_memory_bytes": 1 << 30, "kv_offloading_size": 0.5})
    assert config.enable_cpu_offload and not engine_config(tmp_path, {"kv_cache_memory_bytes": 9}).enable_cpu_offload
    for arguments, told in (
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0: must be"),
        ({"kv_offloading_size": 0}, "kv_offloading_size=0: must be None or a number of GiB above 0"),
        ({"kv_offloading_size": math.nan}, "kv_offloading_size=nan: must be None or a number"),
        (
            {"kv_cache_memory_bytes": 9, "num_gpu_blocks": 8},
            "kv_cache_memory_bytes=9: num_gpu_blocks=8 sizes the same memory in blocks: give only one of them",
        ),
        (
            {"kv_offloading_size": 1, "num_cpu_blocks": 8},
            "kv_offloading_size=1: num_cpu_blocks=8 sizes the same memory in blocks: give only one of them",
        ),
    ):
        with pytest.raises(ConfigError) as refusal:
            engine_config(tmp_path, arguments)
        assert told in str(refusal.value)


@pytest.mark.parametrize("name", PAGES)
def test_the_documented_arguments_are_those_of_the_dataclass(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert page(text, PAGES[name]) == text, "write it again: python -m tools.arguments"
