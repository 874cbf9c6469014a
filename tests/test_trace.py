"""The timeline: steps, kernels by name, copies with their bytes, and the overlap that is read from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

from benchmarks.timeline import Overlap, Timeline
from nanovllm import LLM
from nanovllm.errors import ConfigError

BLOCK = 16
VOCAB = 97


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, hidden=32, intermediate=32)
    return path


def test_an_engine_writes_what_it_did_when_it_is_closed(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(model_dir, dtype="float32", trace=path, max_num_batched_tokens=45, **offloaded(BLOCK, 6)) as llm:
        prompts = [random_prompt(length, VOCAB, 1) for length in (80, 70)]
        traced = token_ids(llm, prompts, greedy(3))
        assert not path.exists()
        moved = llm.kv_stats().transfers
    with LLM(model_dir, dtype="float32", max_num_batched_tokens=45, **offloaded(BLOCK, 6)) as llm:
        assert token_ids(llm, prompts, greedy(3)) == traced
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    names = {event["name"] for event in events}
    assert {"step", "wait", "write K/V", "attend", "attend on the host"} <= names
    steps = [event for event in events if event["name"] == "step"]
    kernels = [event for event in events if event["name"] == "attend"]
    assert all(any(s["ts"] <= k["ts"] and k["ts"] + k["dur"] <= s["ts"] + s["dur"] for s in steps) for k in kernels)
    timeline = Timeline.read(path)
    for kind, count, total in (("h2d", moved.h2d_copies, moved.h2d_bytes), ("d2h", moved.d2h_copies, moved.d2h_bytes)):
        copies = [copy for copy in timeline.copies if copy.name.startswith(kind)]
        assert 0 < len(copies) <= count, "a call carries neighbouring blocks"
        assert sum(copy.num_bytes for copy in copies) == total
    overlap = Overlap.of(timeline, timeline.steps, timeline.steps[-1].end)
    assert 0 <= overlap.hidden_s <= overlap.copies_s and 0 < overlap.waits_s < overlap.steps_s


def test_a_process_has_one_trace_at_a_time(model_dir: Path, tmp_path: Path) -> None:
    sizes = {"dtype": "float32", "num_gpu_blocks": 20, "kvcache_block_size": BLOCK}
    with LLM(model_dir, **sizes, trace=tmp_path / "first.json") as llm:
        with pytest.raises(ConfigError, match="torch's profiler runs in this process already"):
            LLM(model_dir, **sizes, trace=tmp_path / "second.json")
        token_ids(llm, [random_prompt(20, VOCAB, 1)], greedy(2))
    assert (tmp_path / "first.json").exists() and not (tmp_path / "second.json").exists()
    with LLM(model_dir, **sizes, trace=tmp_path / "second.json") as llm:
        token_ids(llm, [random_prompt(20, VOCAB, 1)], greedy(2))
    assert (tmp_path / "second.json").exists()


def test_overlap_on_a_gpu_is_read_from_the_profilers_kernels_and_copies(tmp_path: Path) -> None:
    """By hand: a step from 0 to 10 s, kernels from 1 to 4 and 6 to 9, a copy from 2 to 7."""

    def event(cat: str, name: str, begin: float, end: float, **args: int) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": args}

    events = [
        event("gpu_user_annotation", "step", 0, 10),
        event("gpu_user_annotation", "attend", 1, 4),
        event("user_annotation", "wait", 0, 9),  # of the host, which only submits
        event("kernel", "attend_kernel", 1, 4),
        event("kernel", "product", 6, 9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2, 7, bytes=100),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2, 7, bytes=100),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    timeline = Timeline.read(path)
    overlap = Overlap.of(timeline, timeline.steps, 10.0)
    assert (overlap.copied_bytes, overlap.copies_s, overlap.hidden_s, overlap.waits_s) == (100, 5.0, 3.0, 3.0)
