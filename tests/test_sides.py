"""The engine without one of its sides: what is refused, and that the rest goes on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from content_model import expected_output
from engine_helpers import Bench, crowd, prompt_of

from nanovllm import LLM
from nanovllm.cli.templates import chat_template
from nanovllm.engine import sides
from nanovllm.errors import ConfigError, RequestError
from nanovllm.kvcache.layerwise import LayerwiseMemory

GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"n": 3, "temperature": 1.0}, "n=3"),
    ({"best_of": 2, "temperature": 1.0}, "best_of=2"),
    ({"n": 2, "use_beam_search": True}, "use_beam_search=True"),
]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The side that the test names is not installed."""
    monkeypatch.setattr(sides, request.param, lambda: None)


@pytest.mark.parametrize("without", ["sequence_groups"], indirect=True)
@pytest.mark.parametrize("params, name", GROUPS)
def test_several_sequences_are_refused_and_others_run(without: None, params: dict[str, Any], name: str) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=f"^{name}: needs nanovllm.sequence_groups, .* with n=1$"):
        bench.add("several", prompt_of(5), **params)
    bench.add("one", prompt_of(5))
    bench.run()
    assert bench.tokens("one") == expected_output(prompt_of(5), 8)


@pytest.mark.parametrize("without", ["sequence_groups"], indirect=True)
def test_single_sequences_are_preempted_by_recomputation(without: None) -> None:
    bench = Bench(12)
    lengths = {"first": 14, "second": 15, "third": 13}
    crowd(bench, lengths)
    bench.run()
    for priority, (name, length) in enumerate(lengths.items()):
        assert bench.tokens(name) == expected_output(prompt_of(length, priority), 12)
    assert bench.scheduler.preemption.stats.recomputed > 0


@pytest.mark.parametrize("without", ["sequence_groups"], indirect=True)
@pytest.mark.parametrize("arguments, name", [({"preemption_mode": "swap"}, "'swap'"), ({"swap_space": 2.5}, "2.5")])
def test_swapping_is_refused(without: None, arguments: dict[str, Any], name: str, tmp_path: Path) -> None:
    (argument,) = arguments
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=f"^{argument}={name}: needs nanovllm.sequence_groups"):
        LLM(tmp_path, num_gpu_blocks=8, kvcache_block_size=16, **arguments)


@pytest.mark.parametrize("without", ["trace"], indirect=True)
def test_a_trace_is_refused(without: None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"^trace='t.json': needs nanovllm.device.trace, .*; leave it out$"):
        LLM(tmp_path, num_gpu_blocks=8, kvcache_block_size=16, trace="t.json")


@pytest.mark.parametrize("without", ["layerwise_prefill"], indirect=True)
def test_a_long_prompt_goes_chunk_by_chunk(without: None) -> None:
    bench = Bench(4, 40, budget=10, num_layers=3, layerwise_memory=LayerwiseMemory(40, 160))
    bench.add("long", prompt_of(70), 4)
    bench.add("short", prompt_of(3, 1), 4)
    bench.run()
    assert bench.tokens("long") == expected_output(prompt_of(70), 4)
    assert bench.tokens("short") == expected_output(prompt_of(3, 1), 4)
    assert not any(batch.layerwise for batch in bench.executor.batches)


@pytest.mark.parametrize("without", ["chat_templates"], indirect=True)
def test_conversations_are_refused_and_prompts_run(without: None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with LLM(tmp_path, num_gpu_blocks=8, kvcache_block_size=16) as llm:
        with pytest.raises(RequestError, match=r"^chat\(\) needs nanovllm.chat_template, .* to generate\(\)$"):
            llm.chat([{"role": "user", "content": "hello"}])
        with pytest.raises(RequestError, match=r"^messages need nanovllm.chat_template"):
            chat_template(llm, "{{ messages }}")
        assert len(llm.generate([1, 2, 3], use_tqdm=False)) == 1


@pytest.mark.parametrize("without", ["planner"], indirect=True)
def test_a_plan_is_refused(without: None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with LLM(tmp_path, num_gpu_blocks=8, kvcache_block_size=16) as llm, pytest.raises(Exception, match="planner"):
        llm.plan()
