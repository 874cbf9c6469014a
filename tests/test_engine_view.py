"""What applications see of a running engine."""

from __future__ import annotations

from pathlib import Path

from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt

from nanovllm import LLM, KVBlockState


def test_a_view_tells_requests_blocks_and_progress(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, layers=4)
    with LLM(tmp_path, **offloaded(num_gpu_blocks=5, num_cpu_blocks=30, max_num_seqs=1)) as llm:
        view = llm.view()
        inside = []
        assert (view.limits.max_num_seqs, view.limits.num_layers) == (1, 4)
        llm.watch_steps(lambda share: inside.append((share, view.prefill(share), view.block_states(share))))
        for name in ("first", "second"):
            llm.engine.add_request(name, None, greedy(3), random_prompt(40, 199, 1))
        assert [request.request_id for request in view.waiting] == ["first", "second"] and not view.running
        llm.engine.step()
        (running,) = view.running
        (waiting,) = view.waiting
        assert (running.prompt_tokens, running.prompt_tokens_computed, running.output_tokens) == (40, 40, 1)
        assert (waiting.prompt_tokens_computed, waiting.blocks, view.swapped) == (0, (), [])
        states = view.block_states()
        assert len(states) == sum(view.tiers.values())
        held = {block for block, state in enumerate(states) if state >= KVBlockState.USED}
        assert held == set(running.blocks) and len(held) == -(-40 // llm.kv_stats().block_size)
        done = [prefill.tokens_done for _, prefill, _ in inside]
        assert done == [40 * share for share, _, _ in inside] and len(done) == 4
        assert all(prefill.uncounted == int(prefill.tokens_done) for _, prefill, _ in inside)
        assert {prefill.layer for _, prefill, _ in inside} == {1, 2, 3, 4}
        assert all(KVBlockState.FILLING in states for _, _, states in inside)
        llm.watch_steps(None)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        assert not view.running and view.metrics().blocks.cached and view.prefix_cache.hit_tokens == 39 // 16 * 16
        assert not set(view.block_states()) - {KVBlockState.FREE, KVBlockState.CACHED}
