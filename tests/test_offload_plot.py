"""What the picture of bench_offload.py shows, and how much of a trace's copies counts as hidden; little is drawn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_helpers import ROOT, main_of

from nanovllm.errors import ConfigError

COMMITTED = ROOT / "benchmarks" / "results" / "offload-2layers.json"


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.offload_plot")


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.timeline")


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median / 2, "high": median * 2}


def result(prompt_len: int, **parts: Any) -> dict[str, Any]:
    rates = {"prefill_tok_s": spread(prompt_len / 2), "decode_tok_s": spread(40.0)}
    return {"prompt_len": prompt_len, "rates": {"on device": rates, "offload": rates}, "by_share": None, **parts}


def share(name: str, taken: float | None) -> dict[str, Any]:
    return {"name": name, "taken": taken, "token_ms": spread(20.0)}


def report_of(*results: dict[str, Any]) -> dict[str, Any]:
    lengths = [found["prompt_len"] for found in results]
    arguments = {"prompt_len": lengths, "block_size": 16, "max_num_batched_tokens": 48, "device_share": "1/8"}
    machine = {"device": "cpu", "cpu": "a CPU", "threads": 2, "torch": "2", "date": "2026-01-02T03:04", "commit": "abc"}
    model = {"name": "tiny", "num_layers": 3, "dtype": "bfloat16"}
    return {"arguments": arguments, "machine": machine, "model": model, "results": list(results)}


# ---- speeds and shares


def test_speeds_are_points_of_every_engine_shortest_prompt_first(plot: ModuleType) -> None:
    results = plot.results_of(report_of(result(200), result(100)))
    found = plot.speeds(results, "prefill")
    assert list(found) == ["on device", "offload"]
    assert found["offload"] == [plot.Point(100, 50.0, 25.0, 100.0), plot.Point(200, 100.0, 50.0, 200.0)]
    for each in results:
        each["rates"]["offload"]["decode_tok_s"] = None  # one token has no decode
        each["rates"]["on device"] = each["rates"]["offload"]
    assert plot.speeds(results, "decode") == {}


def test_decode_by_share_is_drawn_for_the_longest_that_has_it(plot: ModuleType) -> None:
    measured = [share("on device", None), share("share 0", None), share("share 0.5", 0.6), share("automatic", 1.0)]
    results = [result(100, by_share={"results": measured}), result(200)]
    found = plot.shares(results)
    assert found.prompt_len == 100
    assert found.on_device.median == 50.0 and (found.on_device.low, found.on_device.high) == (25.0, 100.0)
    assert [point.x for point in found.forced] == [0.0, 0.6], "as counted, where it was"
    assert found.automatic.x == 1.0
    assert plot.shares([result(100)]) is None


def test_the_title_says_shape_device_date_and_commit(plot: ModuleType) -> None:
    report = report_of(result(100))
    title = plot.title_of(report)
    for words in ("tiny, 3 layers, bfloat16", "blocks of 16", "a CPU, threads: 2", "2026-01-02;", "commit abc"):
        assert words in title
    report["machine"] |= {"gpu": "a GPU", "commit": None}
    assert "a GPU" in plot.title_of(report) and "no commit" in plot.title_of(report)


def test_a_committed_result_can_be_drawn(plot: ModuleType) -> None:
    found = plot.results_of(json.loads(COMMITTED.read_text()))
    assert [result["prompt_len"] for result in found] == [8192, 32768] and plot.shares(found) is not None
    assert len(plot.speeds(found, "prefill")) == 3


@pytest.mark.parametrize("content", ["{}", "[]", '{"arguments": {}, "results": 3}', '{"arguments": {"prompt_len": 3}}'])
def test_other_files_are_refused(
    plot: ModuleType, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "load_pyplot", lambda: None)
    (tmp_path / "r.json").write_text(content)
    for name, told in (("r.json", "none of bench_offload.py"), ("absent.json", "cannot be read as JSON")):
        assert main_of("benchmarks.offload_plot")([str(tmp_path / name), str(tmp_path / "p.png")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and told in error
    assert not (tmp_path / "p.png").exists()


# ---- timelines

STREAMS = ("compute", "kv-slot-0", "kv-slot-1")


def write_trace(path: Path, *slices: tuple[str, int, int, int, int]) -> Path:
    """Slices as (name, stream, begin, end, bytes), times in milliseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}} for tid, name in enumerate(STREAMS)
    ]
    for name, tid, begin, end, num_bytes in slices:
        times = {"ts": begin * 1e3, "dur": (end - begin) * 1e3}
        events.append({"ph": "X", "name": name, "tid": tid, **times, "args": {"bytes": num_bytes} if num_bytes else {}})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A probe, a prefill step and a decode step."""
    return write_trace(
        tmp_path / "trace.json",
        ("step", 0, 0, 50, 0),  # measures bandwidths: attends to nothing
        ("h2d copy", 1, 10, 40, 9000),
        ("step", 0, 100, 200, 0),
        ("write K/V", 0, 110, 120, 5),
        ("attend", 0, 150, 190, 7),
        ("h2d copy", 1, 100, 140, 1000),
        ("wait", 0, 130, 150, 0),
        ("d2h copy", 2, 120, 160, 200),
        ("d2h copy", 2, 190, 210, 300),  # ends after its step
        ("step", 0, 300, 350, 0),
        ("attend on the host", 0, 310, 320, 9),
        ("h2d copy", 1, 305, 315, 50),
    )


def test_overlap_is_time_in_which_copies_ran_and_computation_did_not_wait(timeline: ModuleType, trace: Path) -> None:
    found = timeline.overlaps(timeline.Timeline.read(trace), decode_steps=1)
    prefill, decode = found["prefill"], found["decode"]
    assert prefill.copied_bytes == 1500 and decode.copied_bytes == 50, "the probe is no part of either"
    assert prefill.steps_s == pytest.approx(0.1) and prefill.copies_s == pytest.approx(0.08)
    # 60 ms at the same time, 20 of them waited for; of the last copy's 20, only 10 are within the step.
    assert prefill.hidden_s == pytest.approx(0.05) and prefill.hidden_share == pytest.approx(0.625)
    assert prefill.waits_s == pytest.approx(0.02) and decode.waits_s == 0
    assert decode.hidden_share == pytest.approx(1)
    assert list(timeline.overlaps(timeline.Timeline.read(trace), decode_steps=0)) == ["prefill"]


def test_nothing_copied_has_no_overlap(timeline: ModuleType, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", ("step", 0, 0, 10, 0), ("attend", 0, 2, 3, 0))
    found = timeline.overlaps(timeline.Timeline.read(path), decode_steps=0)["prefill"]
    assert found.hidden_share is None and found.copied_bytes == 0 and found.steps_s == pytest.approx(0.01)


def test_windows_are_the_step_that_copies_most_and_the_last(
    plot: ModuleType, timeline: ModuleType, trace: Path, tmp_path: Path
) -> None:
    most, last = plot.windows(timeline.Timeline.read(trace))
    assert most.title == "the step that copies most: 0.0 MiB copied in 100.0 ms"
    assert list(most.rows) == list(STREAMS) and list(last.rows) == ["compute", "kv-slot-0"]
    assert list(most.rows["compute"]) == ["write K/V", "attend", "wait"]
    assert most.rows["kv-slot-1"]["d2h copy"] == [pytest.approx((20, 40)), pytest.approx((90, 10))], "cut at the end"
    assert last.milliseconds == pytest.approx(50)
    only = write_trace(tmp_path / "one.json", ("step", 0, 0, 10, 0), ("attend", 0, 2, 3, 0))
    assert len(plot.windows(timeline.Timeline.read(only))) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": [{}]}', '{"traceEvents": [3]}'])
def test_what_is_no_trace_is_refused(timeline: ModuleType, content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ConfigError, match=r"t\.json' is not a trace that nanovllm wrote"):
        timeline.Timeline.read(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="no forward pass"):
        timeline.Timeline.read(write_trace(tmp_path / "t.json", ("step", 0, 0, 1, 0)))


def test_gaps_between_kernels_are_of_all_streams_together(timeline: ModuleType, tmp_path: Path) -> None:
    kernels = [(0, 10), (10, 5), (30, 10), (32, 4)]  # begin and duration in microseconds
    events = [{"cat": "kernel", "ts": ts, "dur": dur} for ts, dur in kernels]
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"traceEvents": [*events, {"cat": "gpu_memcpy", "ts": 15, "dur": 15}, {"ph": "M"}]}))
    found = timeline.Gaps.read(path)
    assert found.kernels == 4 and found.span_s == pytest.approx(40e-6) and found.idle_s == pytest.approx(15e-6)
    path.write_text('{"traceEvents": []}')
    assert timeline.Gaps.read(path) is None


def test_all_of_it_can_be_drawn(plot: ModuleType, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures take matplotlib")
    picture = tmp_path / "p.png"
    assert main_of("benchmarks.offload_plot")([str(COMMITTED), str(picture), "--trace", str(trace)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
