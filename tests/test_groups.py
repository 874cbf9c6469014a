"""Requests of several sequences: shared prompts, copy-on-write, ranking, and what is refused. No torch."""

from __future__ import annotations

import pytest
from content_model import expected_output, logprob_of
from engine_helpers import BLOCK, Bench, prompt_of
from group_helpers import expected_group, outputs, sampled

from nanovllm.data.batch import BlockMove
from nanovllm.errors import RequestError

# ---- one prompt, several sequences


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 30])
@pytest.mark.parametrize("device, host", [(64, 0), (5, 40), (0, 40)])
def test_the_prompt_is_computed_once_for_all(length: int, device: int, host: int) -> None:
    bench = Bench(device, host, budget=10)
    sampled(bench, "a", prompt_of(length), 9, n=4)
    finished = bench.run()["a"]
    assert outputs(bench, "a") == expected_group(prompt_of(length), 4, 9)
    assert [output.index for output in finished.outputs] == [0, 1, 2, 3]
    assert finished.metrics.prefill_tokens == length and finished.metrics.decode_tokens == 4 * 8
    prefill = [row for row in bench.rows("a") if row.context_len < length]
    assert sum(len(row.token_ids) for row in prefill) == length and len(prefill[-1].samples) == 4
    assert bench.manager.pool.num_used == 0


@pytest.mark.parametrize("device, host", [(64, 0), (0, 64), (3, 64)])
def test_copy_on_write_copies_exactly_one_block(device: int, host: int) -> None:
    bench = Bench(device, host)
    sampled(bench, "a", prompt_of(BLOCK + 2), 2, n=2)
    bench.step()
    tables = [list(seq.block_tables[0]) for seq in bench.scheduler.running[0].sequences]
    assert tables[0] == tables[1] and bench.manager.pool.num_used == 2, (
        "all blocks are shared, including the partly filled one"
    )
    bench.step()
    (move,) = bench.executor.batches[-1].moves
    first, second = (row.block_tables[0] for row in bench.executor.batches[-1].sequences)
    assert move == BlockMove(second[1], first[1], keeps_source=True), "the last sequence to write needs no copy"
    assert first[0] == second[0] and bench.executor.num_copies == bench.manager.num_copied_blocks == 1
    assert outputs(bench, "a") == expected_group(prompt_of(BLOCK + 2), 2, 2)


def test_all_sequences_of_a_group_run_or_none() -> None:
    bench = Bench(max_num_seqs=5, budget=6)
    sampled(bench, "group", prompt_of(4), 6, n=3)
    sampled(bench, "other", prompt_of(4, 1), 6, n=3)
    bench.add("single", prompt_of(4, 2), 6)
    for _ in bench.steps():
        names = [bench.names[row.seq_id] for row in bench.executor.batches[-1].sequences if row.context_len >= 4]
        assert names.count("group") in (0, 3) and names.count("other") in (0, 3)
    assert outputs(bench, "group") == expected_group(prompt_of(4), 3, 6)
    assert outputs(bench, "other") == expected_group(prompt_of(4, 1), 3, 6)
    assert bench.order[0] == "group", "the others wait for its sequence slots"


def test_best_of_returns_the_most_likely_first() -> None:
    prompt = prompt_of(7)
    bench = Bench()
    sampled(bench, "a", prompt, 6, n=2, best_of=5)
    for step in bench.steps():
        assert step[0].finished or step[0].outputs == [], "the ranking is not known before the end"
    group = sorted(expected_group(prompt, 5, 6), key=lambda output: -logprob_of(prompt, output))
    assert outputs(bench, "a") == group[:2]
    found = [output.cumulative_logprob for output in bench.finished["a"].outputs]
    assert found == pytest.approx([logprob_of(prompt, output) for output in group[:2]])
    assert [output.index for output in bench.finished["a"].outputs] == [0, 1]
    assert bench.finished["a"].outputs[0].logprobs is None, "no logprobs were asked for"


# ---- refusals


def test_a_group_that_could_not_finish_alone_is_refused_with_numbers() -> None:
    """10 blocks, the watermark is 0: 1 full block of the prompt, and 3 of its own for each of 3 sequences."""
    bench = Bench(10)
    params = {"n": 3, "temperature": 1.0}
    with pytest.raises(RequestError) as refusal:
        bench.add("big", prompt_of(BLOCK + 2), 2 * BLOCK + BLOCK, **params)
    for part in ("'big'", "3 sequences of up to 18 tokens", "13 KV blocks of 4 tokens", "has 10", "max_tokens to 11"):
        assert part in str(refusal.value), part
    bench.add("fits", prompt_of(BLOCK + 2), 11, **params)
    bench.run()
    with pytest.raises(RequestError, match="max_tokens to 11"):
        bench.add("big", prompt_of(BLOCK + 2), 12, **params)
    bench.add("one token each", prompt_of(40), 1, **params)
    bench.run()
    assert len(outputs(bench, "fits")) == len(outputs(bench, "one token each")) == 3


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_more_sequences_than_run_together_are_refused(limit: str) -> None:
    bench = Bench(max_num_seqs=3 if limit == "max_num_seqs" else 9, budget=24 if limit == "max_num_seqs" else 3)
    with pytest.raises(RequestError, match=f"4 sequences, which run together, and {limit} is 3"):
        bench.add("a", prompt_of(5), 4, temperature=1.0, n=4)
    bench.add("a", prompt_of(5), 4, temperature=1.0, n=3)
    assert len(bench.run()["a"].outputs) == 3


# ---- chunks


def test_a_long_prompt_takes_at_most_the_threshold_of_a_step() -> None:
    bench = Bench(700, budget=1024, chunk_cap=400)
    for index, name in enumerate("abc"):
        bench.add(name, prompt_of(800, index), 2)
    shares = []
    for _ in range(3):
        bench.step()
        shares.append(list(bench.chunks().values()))
    assert shares == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]
    bench.run()
    for index, name in enumerate("abc"):
        assert bench.tokens(name) == expected_output(prompt_of(800, index), 2)
