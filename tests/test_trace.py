"""The timeline: valid JSON, a row for each stream, copies with their bytes, kernels by name, overlap that was there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

from nanovllm import LLM

BLOCK = 16
VOCAB = 97
LINEAR = ("norm, QKV, RoPE", "output projection, MLP", "embedding", "final norm", "logits")
META = {"process_name", "thread_name", "thread_sort_index"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, hidden=32, intermediate=32)
    return path


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The slices of each stream, by the stream's name, after the checks that hold for every trace."""
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "M":
            assert event["name"] in META
            continue
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0
        rows[names[event["tid"]]].append(event)
    for slices in rows.values():
        assert [s["ts"] for s in slices] == sorted(s["ts"] for s in slices)
    return rows


def in_turn(slices: list[dict[str, Any]]) -> bool:
    """Whether each slice began when the one before had ended; times are rounded in the microseconds."""
    return all(a["ts"] + a["dur"] <= b["ts"] + 1e-2 for a, b in itertools.pairwise(slices))


def test_an_engine_writes_what_it_did_when_it_is_closed(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(model_dir, dtype="float32", trace=path, max_num_batched_tokens=45, **offloaded(BLOCK, 6)) as llm:
        prompts = [random_prompt(length, VOCAB, 1) for length in (80, 70)]
        traced = token_ids(llm, prompts, greedy(3))
        assert not path.exists()
        moved = llm.kv_stats().transfers
    with LLM(model_dir, dtype="float32", max_num_batched_tokens=45, **offloaded(BLOCK, 6)) as llm:
        assert token_ids(llm, prompts, greedy(3)) == traced
    rows = rows_of(path)
    compute = rows.pop("compute")
    assert {s["name"] for s in compute} == {"step", "wait", "write K/V", "attend", "attend on the host", *LINEAR}
    kernels = [s["args"] for s in compute if s["name"] not in ("step", "wait")]
    assert all(args["bytes"] > 0 and args["declared"] > 0 for args in kernels)
    assert set(rows) == {"kv-loads", "kv-stores", "kv-moves"}
    copies = [s for slices in rows.values() for s in slices]
    for kind, count, total in (("h2d", moved.h2d_copies, moved.h2d_bytes), ("d2h", moved.d2h_copies, moved.d2h_bytes)):
        of_kind = [s["args"] for s in copies if s["name"] == f"{kind} copy"]
        assert 0 < len(of_kind) <= count, "a call carries neighbouring blocks"
        assert sum(args["bytes"] for args in of_kind) == total
    assert all(in_turn(slices) for slices in rows.values())
