"""Tensor parallelism with two ranks on the CPU: the tokens are one rank's and Transformers', to the bit repeatable."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import greedy, greedy_reference, offloaded, random_prompt, token_ids
from fast import fast_only
from lora_helpers import make_adapter
from quantized_checkpoints import quantize
from rank_processes import is_running, kept_rank_processes
from test_gemma4 import LARGE, MIXTURE, SMALL
from waiting import eventually

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.distributed.group import _sum_in_order
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import META
from nanovllm.layers.parallel import MetaRanks

RESIDENT: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 40}
VOCAB = 199


@pytest.fixture(scope="module", autouse=True)
def rank_processes() -> Iterator[None]:
    with kept_rank_processes():
        yield


model_dir = checkpoint_fixture(kv_heads=2, heads=4, layers=3)


def two_ranks(path: Path, **arguments: Any) -> LLM:
    return LLM(path, tensor_parallel_size=2, **arguments)


def prompts(*lengths: int) -> list[list[int]]:
    return [random_prompt(length, VOCAB, length) for length in lengths]


# ---- the division of a network


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_query_head_is_on_one_rank_with_its_kv_head(kv_heads: int, group: int, num_ranks: int) -> None:
    heads = kv_heads * group
    ranks_of_heads = [
        [rank * kv_heads // num_ranks for rank in range(num_ranks)].count(head) for head in range(kv_heads)
    ]
    build = BuildContext(torch.float32, META, group=MetaRanks(0, num_ranks))
    if max(ranks_of_heads) > group:
        with pytest.raises(ConfigError, match=rf"tensor_parallel_size={num_ranks}: .*{heads} query heads"):
            build.split_heads(heads, kv_heads)
        return
    ranks = build.heads_of_ranks(heads, kv_heads)
    assert [head for own, _ in ranks for head in own] == list(range(heads))
    assert [row for part in build.splits(199, "vocab") for row in part.held] == list(range(199))
    for own, own_kv in ranks:
        own_group = len(own) // len(own_kv)
        assert [own_kv[index // own_group] for index in range(len(own))] == [head // group for head in own]


def test_a_sum_goes_through_the_ranks_in_order_in_fp32() -> None:
    parts = torch.tensor([[1.0], [2.0**-9], [2.0**-9], [-1.0]], dtype=torch.bfloat16)
    assert _sum_in_order(parts.clone()).item() == 2.0**-8  # in bfloat16, 1 + 2^-9 is 1
    one = torch.tensor([1e8])
    tiny = torch.tensor([1.0])
    assert _sum_in_order(torch.stack([one, -one, tiny])).item() == 1.0
    assert _sum_in_order(torch.stack([one, tiny, -one])).item() == 0.0


# ---- tokens

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "one KV head on both ranks": {"family": "qwen3", "kv_heads": 1, "tie": True},
    "a KV head for each rank": {"family": "qwen2", "kv_heads": 2},
    "unequal ranks": {
        "family": "llama",
        "kv_heads": 3,
        "heads": 6,
        "hidden": 96,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "experts": {"family": "qwen3_moe", "mlp_only_layers": [1]},
    "two KV heads for each rank": {"family": "mistral", "kv_heads": 4, "sliding_window": 24, "intermediate": 97},
    "sinks, and experts with biases": {"family": "gpt_oss", "kv_heads": 1, "experts": 4},
    "norms over the heads of both ranks": {"family": "olmo3", "kv_heads": 1, "sliding_window": 24, "layers": 4},
    "recurrent layers": {"family": "qwen3_5", "layers": 4, "kv_heads": 1},
    "layers that differ in heads": {"family": "gemma4", **LARGE},
    "layers with inputs of their own": {"family": "gemma4", **SMALL},
    "experts beside the MLP": {"family": "gemma4", **MIXTURE},
    "norms of sums over the ranks": {"family": "gemma3", "kv_heads": 1, "tie": True, "sliding_window": 24},
}


@pytest.mark.parametrize("name", fast_only(["unequal ranks"], CHECKPOINTS))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, **CHECKPOINTS[name])
    given = prompts(33, 112, 7)
    expected = [greedy_reference(model, prompt, 6) for prompt in given]
    for arguments in (RESIDENT, offloaded(16, 4, 60, max_num_batched_tokens=32)):
        with two_ranks(tmp_path, **arguments) as llm:
            assert token_ids(llm, given, greedy(6)) == expected
            assert token_ids(llm, given, greedy(6)) == expected  # from the prefix cache


@pytest.mark.slow
def test_three_ranks_sum_large_tensors_in_parts(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", hidden=192, heads=6, head_dim=16, kv_heads=2, max_positions=1024)
    given = prompts(700, 33)
    expected = [greedy_reference(model, prompt, 10) for prompt in given]
    found = []
    for chunk in (64, 4096):  # sums of 48 KiB, and of 525
        arguments = {"kvcache_block_size": 16, "num_gpu_blocks": 80, "max_num_batched_tokens": chunk}
        with LLM(tmp_path, tensor_parallel_size=3, **arguments) as llm:
            assert token_ids(llm, given, greedy(10)) == expected
            found.append(logprobs_of(llm, given))
    assert found[0] == found[1]


WAYS: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "recompute": ({**RESIDENT, "num_gpu_blocks": 12, "preemption_mode": "recompute"}, greedy(40)),
    "swap": ({**RESIDENT, "num_gpu_blocks": 12, "preemption_mode": "swap", "swap_space": 0.01}, greedy(40)),
    "swap under offload": (offloaded(16, 4, 9, preemption_mode="swap", swap_space=0.01), greedy(40)),
    "8-bit KV": (offloaded(16, 4, 60, kv_cache_dtype="int8"), greedy(40)),
    "sampling": (RESIDENT, SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)),
    "beam search": (
        RESIDENT,
        SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=12, ignore_eos=True),
    ),
}


@pytest.mark.parametrize("way", fast_only(["sampling"], WAYS))
def test_tokens_are_those_of_one_rank(way: str, model_dir: Path) -> None:
    found = []
    (arguments, params) = WAYS[way]
    for size in (1, 2):
        with LLM(model_dir, tensor_parallel_size=size, **arguments) as llm:
            outputs = llm.generate(prompts(30, 45, 52), params, use_tqdm=False)
            found.append([[sequence.token_ids for sequence in output.outputs] for output in outputs])
            if "preemption_mode" in arguments:
                preempted = llm.metrics().preemptions
                assert (preempted.swapped if arguments["preemption_mode"] == "swap" else preempted.recomputed) > 0
    assert found[0] == found[1]


def test_adapters_of_a_quantized_model_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """`test_sharded_weights.py` has the other forms of weights, and the tokens of merged models."""
    model = make_checkpoint(tmp_path / "plain", hidden=128, intermediate=128, heads=4, kv_heads=2, head_dim=32)
    adapter = make_adapter(tmp_path / "adapter", model)
    path = quantize(tmp_path / "plain", tmp_path / "awq", "awq-32")
    found = []
    for size in (1, 2):
        with LLM(path, tensor_parallel_size=size, enable_lora=True, **RESIDENT) as llm:
            outputs = llm.generate([prompts(40)[0]] * 2, greedy(10), use_tqdm=False, lora_request=[adapter, None])
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def logprobs_of(llm: LLM, given: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Tokens and the bits of their log-probabilities, of prompt and output."""
    params = replace(greedy(12), logprobs=2, prompt_logprobs=1)
    found = []
    for output in llm.generate(given, params, use_tqdm=False):
        positions = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        found.append(
            [(token, logprob.logprob) for position in positions if position for token, logprob in position.items()]
        )
    return found


BUDGETS: list[dict[str, Any]] = [
    RESIDENT,
    offloaded(16, 4, 60, max_num_batched_tokens=32),
    offloaded(16, 9, 60, cpu_attention=False, max_num_batched_tokens=50),
    offloaded(16, 6, 40, max_num_seqs=2),
    *(offloaded(16, num_gpu_blocks, 40, max_num_batched_tokens=40) for num_gpu_blocks in (5, 13, 23)),
]


@pytest.mark.parametrize("num_budgets", fast_only([2], [2, len(BUDGETS)]))
def test_results_do_not_depend_on_memory_budget_batch_or_chunks(num_budgets: int, model_dir: Path) -> None:
    given = prompts(90, 61, 17)
    found = []
    for arguments in BUDGETS[:num_budgets]:
        with two_ranks(model_dir, **arguments) as llm:
            found.append(logprobs_of(llm, given))
            llm.reset_prefix_cache()
            found.append([logprobs_of(llm, [prompt])[0] for prompt in given])
    assert all(each == found[0] for each in found)


# ---- the engine around it


def test_blocks_are_sized_from_memory_alike_on_all_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, kv_heads=3, heads=6, hidden=96)
    with two_ranks(tmp_path, enable_cpu_offload=True, kvcache_block_size=16, max_model_len=200, max_num_seqs=3) as llm:
        stats = llm.kv_stats()
        assert stats.num_gpu_blocks > 4 and stats.bytes_per_block == 2 * 16 * 16 * 4 * 2
        assert len(token_ids(llm, prompts(150), greedy(5))[0]) == 5
        assert llm.plan().kv.num_gpu_blocks == stats.num_gpu_blocks
        assert llm.get_world_size() == 2


def test_logits_processors_run_in_the_process_of_the_engine(model_dir: Path) -> None:
    seen: list[int] = []

    def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(output_ids))
        logits[:] = float("-inf")
        logits[len(output_ids) + 5] = 0.0
        return logits

    def failing(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise LookupError("no such word")

    with two_ranks(model_dir, **RESIDENT) as llm:
        ways = [replace(greedy(4), logits_processors=[each]) for each in (only, failing)]
        first, second = llm.generate(prompts(9, 9), ways, use_tqdm=False)
    assert first.outputs[0].token_ids == [5, 6, 7, 8] and seen == [0, 1, 2, 3]
    assert "no such word (LookupError)" in str(second.error)


def test_an_interrupted_step_leaves_the_engine_usable(model_dir: Path) -> None:
    with two_ranks(model_dir, **RESIDENT) as llm:
        expected = token_ids(llm, prompts(40), greedy(5))

        def interrupt(share: float) -> None:
            raise KeyboardInterrupt

        llm.watch_steps(interrupt)
        with pytest.raises(KeyboardInterrupt):
            token_ids(llm, prompts(40), greedy(5))
        llm.watch_steps(None)

        def interrupting(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            token_ids(llm, prompts(40), replace(greedy(5), logits_processors=[interrupting]))
        assert token_ids(llm, prompts(40), greedy(5)) == expected


def test_a_step_that_some_ranks_have_not_got_ends_the_engine(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first rank would wait for the other one, and for the step after that one's."""
    with two_ranks(model_dir, **RESIDENT) as llm:
        ranks = llm.engine.executor._ranks  # type: ignore[attr-defined]

        def interrupt(message: bytes) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ranks[1].channel, "send_packed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            token_ids(llm, prompts(40), greedy(5))
        with pytest.raises(EngineError, match="a message to the ranks was interrupted; the engine has ended"):
            token_ids(llm, prompts(40), greedy(5))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_engine(rank: int, model_dir: Path) -> None:
    """The first one while it waits for a logits processor. `test_rank_failures.py` has the other ways to fail."""
    with two_ranks(model_dir, **RESIDENT) as llm:
        ranks = llm.engine.executor._ranks  # type: ignore[attr-defined]

        def kill(*given: Any) -> Any:
            os.kill(ranks[rank].process.pid, signal.SIGKILL)
            assert eventually(lambda: not is_running(ranks[rank].process.pid))
            return given[-1]

        if rank == 1:
            llm.watch_steps(kill)
        params = greedy(5) if rank == 1 else replace(greedy(5), logits_processors=[kill])
        with pytest.raises(EngineError, match=f"rank {rank} was killed by signal 9; the engine has ended"):
            token_ids(llm, prompts(40), params)
        assert not any(rank_.process.pid and Path(f"/proc/{rank_.process.pid}").exists() for rank_ in ranks)
