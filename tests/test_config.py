"""Engine arguments: a sentence for everything that cannot be honoured."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError, quoted
from tools.arguments import DOCS, PAGES, page

NAMES = {field.name for field in fields(EngineConfig)} - {"model"}  # the keyword arguments of LLM(model, ...)
FLAGS = ("enable_cpu_offload", "enforce_eager", "enable_lora", "trust_remote_code", "skip_tokenizer_init")


def test_an_unknown_name_is_refused_with_the_nearest_or_with_all(tmp_path: Path) -> None:
    for name, says in (
        ("max_seq_len", "unknown engine argument 'max_seq_len': did you mean 'max_model_len'?"),
        ("Seed", "did you mean 'seed'?"),
        ("warp_factor", f"the valid names are .*{', .*'.join(sorted(NAMES))}"),
    ):
        with pytest.raises(ConfigError, match=re.sub(r"\?$", r"\\?", says)):
            engine_config(tmp_path, {name: 1})


def test_model_is_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", "Qwen/Qwen3-0.6B"):
        with pytest.raises(ConfigError, match=f"{path}.*is not a directory"):
            engine_config(path, {})


NOT_INTS: list[Any] = [1.5, "8", True, math.nan]
# field -> values that are refused
REFUSED: dict[str, list[Any]] = {
    "device": ["gpu", 0],
    "dtype": ["int8", "torch.float16"],
    "kv_cache_dtype": ["fp8_e5m2", 8],
    "load_format": ["pt"],
    "quantization": [4, ["awq"]],
    **{name: [0, *NOT_INTS] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
    "kvcache_block_size": [15, *NOT_INTS],
    "gpu_memory_utilization": [0, 1.01, math.nan, "0.9", True],
    **{key: [0, "True"] for key in (*FLAGS, "cpu_attention", "enable_prefix_caching", "host_products")},
    "batch_invariant": [1, "yes"],
    "num_gpu_blocks": [0, 3, -2, *NOT_INTS],
    "num_cpu_blocks": [-2, *NOT_INTS],
    "seed": [-1, 2**63, *NOT_INTS],
    "long_prefill_token_threshold": [-1, *NOT_INTS],
    "preemption_mode": ["none", True],
    "swap_space": [-0.5, math.inf, "4"],
    "kv_cache_dir": [1, __file__],
    "kv_cache_dir_space": [0, math.inf, "4"],
    "max_logprobs": [-2, *NOT_INTS],
    "tensor_parallel_size": [0, *NOT_INTS],
    "distributed_executor_backend": ["ray", 0],
    "distributed_timeout_seconds": [0, 1e15, math.inf, "60"],
    **{name: [0, 2, "8"] for name in ("max_loras", "max_lora_rank", "max_cpu_loras")},
    "tokenizer": [5, ["a"]],
    "hf_overrides": ["rope", {1: 2}],
    "generation_config": ["none", 5, "/no/such/directory"],
    "kv_cache_memory_bytes": [0, 1.5],
    "weights_memory_bytes": [0, -1, 1.5, True, "", "much", "0%", "-5%", "nan%", "25% of 32K", "101%"],
    "host_weights_bytes": [0, -1, 1.5, True, "", "much", "0%", "50% of 32K", "101%"],
    "weights_dir": [1, "", __file__],
    "kv_offloading_size": [0, math.nan, "1", True],
    "override_generation_config": ["top_p", {1: 2}],
    "served_model_name": ["", [], [5]],
    "revision": [],  # with a directory, any is refused
    "tokenizer_revision": [],
    "download_dir": [5],
    "hf_token": [5],
    "speculative_config": ["ngram", 3, {1: 2}],
    "trace": ["/", "/no/such/directory/trace.json", 3],
}


def test_every_argument_has_a_rule() -> None:
    assert set(REFUSED) == set(NAMES)


@pytest.mark.parametrize("field", REFUSED)
def test_invalid_values_are_refused_with_field_and_value(field: str, tmp_path: Path) -> None:
    for value in REFUSED[field]:
        with pytest.raises(ConfigError) as refusal:
            engine_config(tmp_path, {field: value})
        assert str(refusal.value).startswith(f"{field}={quoted(value)}: ")


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for arguments, says in (
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, r"='uni': runs one rank, and .* is 2"),
        ({"distributed_executor_backend": "external_launcher"}, r"needs tensor_parallel_size above 1"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, r"max_cpu_loras=3: must be at least max_loras=4"),
        ({"num_cpu_blocks": 8}, r"num_cpu_blocks=8: needs enable_cpu_offload=True"),
        ({"cpu_attention": False}, r"cpu_attention=False: needs enable_cpu_offload=True"),
        (
            {"host_weights_bytes": "9G"},
            "host_weights_bytes='9G': needs weights_memory_bytes or enable_cpu_offload=True",
        ),
        ({"weights_dir": "/tmp"}, "weights_dir='/tmp': needs weights_memory_bytes or enable_cpu_offload=True"),
        ({"kv_cache_memory_bytes": 9, "num_gpu_blocks": 8}, "_bytes=9: num_gpu_blocks=8 sizes the same memory"),
        ({"kv_offloading_size": 1, "num_cpu_blocks": 8}, "_size=1: num_cpu_blocks=8 sizes the same memory"),
        ({"block_size": 16, "kvcache_block_size": 32}, "block_size=16: is another name of kvcache_block_size"),
        ({"block_size": 8}, "kvcache_block_size=8: must be"),
        ({"hf_overrides": {"max_model_len": 64}, "max_model_len": 32}, "max_model_len=32: hf_overrides has another"),
        ({"revision": "main"}, "revision='main': .* is a directory, which has no revisions"),
        ({"tokenizer_revision": "main"}, "tokenizer_revision='main': .* which has no revisions"),
        ({"tokenizer": "/no/such/directory"}, "tokenizer='/no/such/directory' is not a directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            engine_config(tmp_path, arguments)


ACCEPTED: list[dict[str, Any]] = [
    {"device": "cpu", "dtype": "float32", "load_format": "dummy", "trace": "trace.json"},
    {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_logprobs": -1},
    {"kvcache_block_size": 16, "num_gpu_blocks": 4, "gpu_memory_utilization": 1},
    {"enable_cpu_offload": True, "num_cpu_blocks": 0, "cpu_attention": False},
    {"num_cpu_blocks": 0, "seed": 2**63 - 1, "enforce_eager": True, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("arguments", ACCEPTED, ids=str)
def test_valid_values_are_kept(arguments: dict[str, Any], tmp_path: Path) -> None:
    config = engine_config(tmp_path, arguments)
    assert {name: getattr(config, name) for name in arguments} == arguments


# ---- vLLM's names and values


def test_other_spellings_of_a_value(tmp_path: Path) -> None:
    given: dict[str, Any]
    for given, field, value in (
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"block_size": 16, "kvcache_block_size": 16}, "kvcache_block_size", 16),
        ({"num_gpu_blocks_override": 40, "num_gpu_blocks": -1}, "num_gpu_blocks", 40),
        ({"max_model_len": -1}, "max_model_len", None),
        ({"hf_overrides": {"a": 1, "max_model_len": 64}}, "hf_overrides", {"a": 1}),
        ({"hf_overrides": {"max_model_len": 64}, "max_model_len": 64}, "max_model_len", 64),
        ({"hf_token": True}, "hf_token", None),
    ):
        assert getattr(engine_config(tmp_path, given), field) == value


def test_none_stands_for_the_default(tmp_path: Path) -> None:
    given = dict.fromkeys((*NAMES, "block_size", "num_gpu_blocks_override"))
    assert engine_config(tmp_path, given) == engine_config(tmp_path, {})


@pytest.mark.parametrize("name", PAGES)
def test_the_documented_arguments_are_those_of_the_dataclass(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert page(text, PAGES[name]) == text, "write it again: python -m tools.arguments"
