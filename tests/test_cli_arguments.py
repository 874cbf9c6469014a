"""Flags are made from the fields of EngineConfig and SamplingParams: none is forgotten, and each is read or refused."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm.apps.cli.arguments import (
    ENGINE,
    NO_ENGINE_FLAGS,
    NO_SAMPLING_FLAGS,
    SAMPLING,
    add_engine_flags,
    add_sampling_flags,
    checked_config,
    engine_arguments,
    flag_name,
    sampling_arguments,
)
from nanovllm.apps.cli.chat import NO_FLAGS
from nanovllm.apps.cli.main import Parser
from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS

GIB_2 = {"kv_cache_memory_bytes": 2**31}
KINDS = {ENGINE: (EngineConfig, NO_ENGINE_FLAGS), SAMPLING: (SamplingParams, NO_SAMPLING_FLAGS)}


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="nanovllm")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return parser


def test_every_field_has_a_flag_with_a_text(parser: argparse.ArgumentParser) -> None:
    flags = {action.option_strings[0]: action for action in parser._actions if action.option_strings}
    wanted = set()
    for kind, (described, left_out) in KINDS.items():
        names = {field.name for field in fields(described)}
        assert set(left_out) <= names
        wanted |= {flag_name(kind, name) for name in names - set(left_out)}
    shown = {flag for flag, action in flags.items() if action.help != argparse.SUPPRESS}
    assert wanted == shown - {"-h", "--model"}  # the model may also be the first argument
    assert {flag_name(ENGINE, name) for name in ENGINE_ALIASES.keys() | ENGINE_ARGUMENTS.keys()} == flags.keys() - shown
    assert all(flags[flag].help for flag in wanted)
    assert set(NO_FLAGS) <= {field.name for field in fields(SamplingParams)}


def test_values(parser: argparse.ArgumentParser) -> None:
    for words, engine, sampling in (
        ("--enable-cpu-offload --num-gpu-blocks -1", {"enable_cpu_offload": True, "num_gpu_blocks": -1}, {}),
        ("--no-enable-prefix-caching --trace t.json", {"enable_prefix_caching": False, "trace": "t.json"}, {}),
        ("--max-model-len 32K --max-tokens 1Ki", {"max_model_len": 32_768}, {"max_tokens": 1024}),
        ("--max-model-len 32k --kv-cache-memory-bytes 2G", {"max_model_len": 32_000, **GIB_2}, {}),
        (
            "--max-model-len none --gpu-memory-utilization .5",
            {"max_model_len": None, "gpu_memory_utilization": 0.5},
            {},
        ),
        ("--top-p=0.9 --top-k -1", {}, {"top_p": 0.9, "top_k": -1}),
        ("--seed 1 --sampling-seed 2", {"seed": 1}, {"seed": 2}),
        ("--stop a --stop b --stop-token-ids 3", {}, {"stop": ["a", "b"], "stop_token_ids": [3]}),
        ("--max-tokens none --ignore-eos", {}, {"max_tokens": None, "ignore_eos": True}),
        ('--logit-bias {"3":-1.5,"4":-Infinity}', {}, {"logit_bias": {3: -1.5, 4: float("-inf")}}),
        ("--early-stopping never --presence-penalty -1", {}, {"early_stopping": "never", "presence_penalty": -1.0}),
        ("--early-stopping true", {}, {"early_stopping": True}),
    ):
        args = parser.parse_args(["--model", "m", *words.split()])
        assert (engine_arguments(args), sampling_arguments(args)) == (engine, sampling), words


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_every_command_takes_the_engine_flags_of_vllm(command: str, tmp_path: Path) -> None:
    """Also where the command has a flag of the same name, such as --chat-template or --shutdown-timeout."""
    parser = importlib.import_module(f"nanovllm.apps.cli.{command}").add_parser(Parser().add_subparsers(), "")
    model = ["--model", str(tmp_path), *(["--input", "data.jsonl", "--output", "out"] if command == "batch" else [])]
    words = "--block-size 32 --enable-chunked-prefill --disable-log-stats --tokenizer-mode auto --kv-cache-dtype auto"
    args = parser.parse_args([*model, *words.split(), "--compilation-config", "{}"])
    assert checked_config(args) == engine_config(tmp_path, {"kvcache_block_size": 32})
    assert "--tokenizer-mode" not in parser.format_help() and "--block-size" not in parser.format_help()
    with pytest.raises(ConfigError, match=r"tokenizer_mode='mistral' is not supported"):
        checked_config(parser.parse_args([*model, "--tokenizer-mode", "mistral"]))
