"""The tables of vLLM's names: each name is this engine's own, accepted where it means the same, or refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm_api
from checkpoints import make_checkpoint

from nanovllm import LLM, EngineArgs, LLMEngine, SamplingParams
from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError, RequestError
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS, SAMPLING_PARAMETERS, Table

ENGINE_FIELDS = {field.name for field in fields(EngineConfig)}
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=97)
    made = LLMEngine.from_engine_args(EngineArgs(model=str(path), block_size=16, num_gpu_blocks=20))
    yield made
    made.close()


class Strange:
    """A value that means nothing anywhere."""


def accepted(table: Table) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_every_name_of_vllm_stands_in_exactly_one_place() -> None:
    for names, own, others in (
        (vllm_api.ENGINE_ARGS.split(), ENGINE_FIELDS | ENGINE_ALIASES.keys(), ENGINE_ARGUMENTS),
        (vllm_api.SAMPLING_PARAMS.split(), SAMPLING_FIELDS, SAMPLING_PARAMETERS),
    ):
        assert [name for name in names if (name in own) + (name in others) != 1] == []
        assert not own & set(others)
    assert ENGINE_ALIASES.keys() & ENGINE_FIELDS == set() and set(ENGINE_ALIASES.values()) <= ENGINE_FIELDS


def test_values_that_mean_what_the_engine_does_anyway_are_accepted(tmp_path: Path) -> None:
    plain = engine_config(tmp_path, {})
    plain_params = SamplingParams()
    for name, value in accepted(ENGINE_ARGUMENTS):
        assert engine_config(tmp_path, {name: value}) == plain, name
    for name, value in accepted(SAMPLING_PARAMETERS):
        assert SamplingParams(**{name: value}) == plain_params, name


def test_all_other_values_are_refused(tmp_path: Path) -> None:
    for name in ENGINE_ARGUMENTS:
        with pytest.raises(ConfigError, match=rf"^{name}=<.* is not supported: (leave it out|use .* instead)$"):
            engine_config(tmp_path, {name: Strange()})
    for name in SAMPLING_PARAMETERS:
        with pytest.raises(RequestError, match=rf"^{name}=<.* is not supported: (leave it out|use .* instead)$"):
            SamplingParams(**{name: Strange()})
    with pytest.raises(ConfigError, match="fully_sharded_loras=0 is not supported"):  # not False
        engine_config(tmp_path, {"fully_sharded_loras": 0})


@pytest.mark.parametrize(
    ("name", "instead"),
    [("guided_json", "structured_outputs"), ("reasoning_effort", "chat_template_kwargs"), ("rope_scaling", "hf_over")],
)
def test_names_that_people_try_everywhere_are_answered_alike(name: str, instead: str, tmp_path: Path) -> None:
    llm = LLM.__new__(LLM)
    for use in (
        lambda: engine_config(tmp_path, {name: {"a": 1}}),
        lambda: EngineArgs(model=str(tmp_path), **{name: {"a": 1}}).create_engine_config(),
        lambda: SamplingParams(**{name: {"a": 1}}),
        lambda: llm.generate("x", **{name: {"a": 1}}),
        lambda: llm.chat([], **{name: {"a": 1}}),
    ):
        with pytest.raises((ConfigError, RequestError), match=f"^{name}.* is not supported: use {instead}"):
            use()


def test_the_methods_of_its_engine_take_its_arguments(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    others = {"lora_request": None, "tokenization_kwargs": None, "trace_headers": None, "session_id": None}
    for name in "abc":
        engine.add_request(name, [1, 2, 3], params, arrival_time=1.0, priority=0, **others)
    assert engine.reset_prefix_cache(reset_running_requests=False, reset_connector=False) is True
    assert engine.abort_request(["a", "b", "unknown"]) is None and engine.get_num_unfinished_requests() == 1
    output = engine.abort_request("c")
    assert output is not None and output.outputs[0].finish_reason == "abort"
    for name, says in (
        ("lora_request", "lora_request=5: the engine was made without LoRA; make it with enable_lora=True"),
        ("session_id", "session_id=5 is not supported: leave it out"),
        ("max_tokens", "unknown argument of add_request 'max_tokens'"),
    ):
        with pytest.raises(RequestError, match=says):
            engine.add_request("d", [1], params, **{name: 5})
    with pytest.raises(RequestError, match="reset_running_requests=True is not supported"):
        engine.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(RequestError, match="internal=True is not supported"):
        engine.abort_request("d", internal=True)
    assert not engine.has_unfinished_requests()


# ---- EngineArgs


def test_engine_args_are_a_dataclass_of_all_names(tmp_path: Path) -> None:
    names = {field.name for field in fields(EngineArgs)}
    assert is_dataclass(EngineArgs)
    assert names == ENGINE_FIELDS | ENGINE_ALIASES.keys() | ENGINE_ARGUMENTS.keys() >= set(vllm_api.ENGINE_ARGS.split())
    args = EngineArgs(str(tmp_path), max_model_len=64, block_size=16)
    args.seed = 3
    config = args.create_engine_config()
    assert (config.max_model_len, config.kvcache_block_size, config.seed) == (64, 16, 3)
    assert engine_config(tmp_path, {k: v for k, v in asdict(args).items() if k != "model"}) == config
    assert EngineArgs(model=str(tmp_path)).create_engine_config() == engine_config(tmp_path, {})


def test_engine_args_refuse_unknown_names_at_once_and_values_when_they_are_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine argument 'max_model_length': did you mean 'max_model_len'"):
        EngineArgs(model=str(tmp_path), max_model_length=64)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is not supported"):
        EngineArgs(model=str(tmp_path), pipeline_parallel_size=2).create_engine_config()


def test_flags_of_engine_args(tmp_path: Path) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model=str(tmp_path))
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs(model=str(tmp_path))
    flags = ["--max-model-len", "64", "--dtype", "half", "--block-size", "32", "--enforce-eager", "--disable-log-stats"]
    flags += ["--hf-overrides", '{"rope_theta": 5.0}', "--served-model-name", "a", "--quantization", "awq"]
    args = EngineArgs.from_cli_args(parser.parse_args(flags))
    assert (args.max_model_len, args.dtype, args.block_size, args.enforce_eager) == (64, "half", 32, True)
    assert (args.hf_overrides, args.served_model_name, args.disable_log_stats) == ({"rope_theta": 5.0}, ["a"], True)
    assert args.quantization == "awq"
