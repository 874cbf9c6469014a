"""vLLM's names: taken where they mean the same; other values and names are refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from nanovllm import EngineArgs, LLMEngine, SamplingParams
from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError, RequestError
from nanovllm.vllm_names import ENGINE_ALIASES, ENGINE_ARGUMENTS, SAMPLING_PARAMETERS

ENGINE_FIELDS = {field.name for field in fields(EngineConfig)}
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=97)
    made = LLMEngine.from_engine_args(EngineArgs(model=str(path), block_size=16, num_gpu_blocks=20))
    yield made
    made.close()


def test_names_of_vllm_stand_in_one_place() -> None:
    assert not (ENGINE_FIELDS | ENGINE_ALIASES.keys()) & ENGINE_ARGUMENTS.keys()
    assert not SAMPLING_FIELDS & SAMPLING_PARAMETERS.keys()
    assert not ENGINE_ALIASES.keys() & ENGINE_FIELDS and set(ENGINE_ALIASES.values()) <= ENGINE_FIELDS


def test_values_that_mean_what_the_engine_does_anyway_are_accepted(tmp_path: Path) -> None:
    plain = engine_config(tmp_path, {})
    for name, values in ENGINE_ARGUMENTS.items():
        for value in values:
            assert engine_config(tmp_path, {name: value}) == plain, name
    for name, values in SAMPLING_PARAMETERS.items():
        for value in values:
            assert SamplingParams(**{name: value}) == SamplingParams(), name


def test_all_other_values_are_refused(tmp_path: Path) -> None:
    for name in ENGINE_ARGUMENTS:
        with pytest.raises(ConfigError, match=rf"^{name}=<object .* is not supported: it must be "):
            engine_config(tmp_path, {name: object()})
    for name in SAMPLING_PARAMETERS:
        with pytest.raises(RequestError, match=rf"^{name}=<object .* is not supported: it must be "):
            SamplingParams(**{name: object()})
    with pytest.raises(ConfigError, match="enable_sleep_mode=0 is not supported: it must be False"):
        engine_config(tmp_path, {"enable_sleep_mode": 0})


def test_unknown_names_are_refused_with_the_nearest_one(tmp_path: Path) -> None:
    for name, nearest in (("max_model", "max_model_len"), ("pipeline_paralel_size", "pipeline_parallel_size")):
        message = f"unknown engine argument '{name}': did you mean '{nearest}'"
        for make in (
            lambda name=name: engine_config(tmp_path, {name: 1}),
            lambda name=name: EngineArgs(model=str(tmp_path), **{name: 1}),
        ):
            with pytest.raises(ConfigError, match=message):
                make()
    with pytest.raises(ConfigError, match=r"unknown engine argument 'zz': the valid names are .*, block_size, "):
        engine_config(tmp_path, {"zz": 1})
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature': did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_the_methods_of_its_engine_take_its_arguments(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], params, arrival_time=1.0, priority=0, lora_request=None)
    assert engine.reset_prefix_cache() is True
    assert engine.abort_request(["a", "b", "unknown"]) is None and engine.get_num_unfinished_requests() == 1
    output = engine.abort_request("c")
    assert output is not None and output.outputs[0].finish_reason == "abort"
    with pytest.raises(
        RequestError, match="lora_request=5: the engine was made without LoRA; make it with enable_lora"
    ):
        engine.add_request("d", [1], params, lora_request=5)
    assert not engine.has_unfinished_requests()


# ---- EngineArgs


def test_engine_args_are_a_dataclass_of_all_names(tmp_path: Path) -> None:
    names = {field.name for field in fields(EngineArgs)}
    assert is_dataclass(EngineArgs)
    assert names == ENGINE_FIELDS | ENGINE_ALIASES.keys() | ENGINE_ARGUMENTS.keys()
    args = EngineArgs(str(tmp_path), max_model_len=64, block_size=16)
    args.seed = 3
    config = args.create_engine_config()
    assert (config.max_model_len, config.kvcache_block_size, config.seed) == (64, 16, 3)
    assert engine_config(tmp_path, {k: v for k, v in asdict(args).items() if k != "model"}) == config
    assert EngineArgs(model=str(tmp_path)).create_engine_config() == engine_config(tmp_path, {})


def test_engine_args_refuse_values_when_they_are_used(tmp_path: Path) -> None:
    args = EngineArgs(model=str(tmp_path), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is not supported: it must be 1"):
        args.create_engine_config()


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
