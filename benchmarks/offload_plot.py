"""Plots the results of bench_offload.py: speed over context length, decode by share, and a step's timeline.

    python -m benchmarks.offload_plot RESULT.json PICTURE.png [--trace TRACE.json]

RESULT.json is the output of `bench_offload.py --output-json`, TRACE.json that of its --trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.options import Parser, exit_status, new_file
from benchmarks.plotting import load_pyplot
from benchmarks.report import mib
from benchmarks.timeline import Slice, Timeline
from nanovllm.device.trace import COMPUTE
from nanovllm.errors import ConfigError

Report = Mapping[str, Any]

ENGINES = {  # by their names in the results: label, and matplotlib's format
    "on device": ("no offload", "C0o-"),
    "resident": ("offload, all on the device", "C1^--"),
    "offload": ("offload, {share} on the device", "C2s-"),
    "offload, chunk-major": ("the same, chunk by chunk", "C3v:"),
}
APART = 1.012  # factor between the points of engines at the same length
COLOURS = {
    "h2d copy": "tab:blue",
    "d2h copy": "tab:orange",
    "write K/V": "tab:red",
    "attend": "tab:green",
    "attend on the host": "tab:olive",
    "wait": "black",
}
REST = "lightgray"


# ---- data


@dataclass(frozen=True, slots=True)
class Point:
    """A median with its extremes, in tokens per second."""

    x: float
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, x: float, spread: Mapping[str, float]) -> Point:
        return cls(x, spread["median"], spread["low"], spread["high"])

    @classmethod
    def of_token_ms(cls, x: float, spread: Mapping[str, float]) -> Point:
        return cls(x, 1e3 / spread["median"], 1e3 / spread["high"], 1e3 / spread["low"])


@dataclass(frozen=True, slots=True)
class Shares:
    """Decode by the share of host blocks that the CPU attends to, at one context length."""

    prompt_len: int
    on_device: Point
    forced: list[Point]
    automatic: Point


@dataclass(frozen=True, slots=True)
class Window:
    """A step and its work by stream and name, as (begin, length) in milliseconds since the step began.

    Only streams with work, the compute stream first. Work that extends beyond the step is cut at its ends.
    """

    title: str
    milliseconds: float
    rows: dict[str, dict[str, list[tuple[float, float]]]]


def results_of(report: Report) -> list[Report]:
    """The result of each prompt length, shortest first."""
    try:
        results: list[Report] = report["results"]
        assert all("offload" in result["rates"] for result in results)
        return sorted(results, key=lambda result: result["prompt_len"])
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(
            "the figures are none of bench_offload.py: give the file that its --output-json wrote"
        ) from error


def speeds(results: Sequence[Report], phase: str) -> dict[str, list[Point]]:
    """Points of "prefill" or "decode" over the prompt length, by engine."""
    found: dict[str, list[Point]] = {name: [] for name in ENGINES}
    for result in results:
        for name, rates in result["rates"].items():
            if (spread := rates[f"{phase}_tok_s"]) is not None:
                found[name].append(Point.of(result["prompt_len"], spread))
    return {name: points for name, points in found.items() if points}


def shares(results: Sequence[Report]) -> Shares | None:
    """Shares of the longest prompt for which they were measured."""
    measured = [result for result in results if result.get("by_share")]
    if not measured:
        return None
    points: dict[str, Point] = {}
    for found in measured[-1]["by_share"]["results"]:
        forced = float(found["name"].removeprefix("share ")) if found["name"].startswith("share ") else 0.0
        taken = forced if found["taken"] is None else found["taken"]
        points[found["name"]] = Point.of_token_ms(taken, found["token_ms"])
    on_device, automatic = points.pop("on device"), points.pop("automatic")
    return Shares(measured[-1]["prompt_len"], on_device, list(points.values()), automatic)


def windows(timeline: Timeline) -> list[Window]:
    """The step that copies most, and the last one, which decodes a token if the run had more than one step."""
    busiest = max(timeline.steps, key=timeline.copied_bytes)
    last = timeline.steps[-1]
    found = [_window("the step that copies most", timeline, busiest)]
    return found if last is busiest else [*found, _window("the last step", timeline, last)]


def _window(what: str, timeline: Timeline, step: Slice) -> Window:
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in timeline.streams}
    for piece in timeline.within(*step.interval):
        begin, end = max(piece.begin, step.begin), min(piece.end, step.end)
        bars = rows[piece.stream].setdefault(piece.name, [])
        bars.append(((begin - step.begin) * 1e3, (end - begin) * 1e3))
    milliseconds = (step.end - step.begin) * 1e3
    title = f"{what}: {mib(timeline.copied_bytes(step))} copied in {milliseconds:,.1f} ms"
    return Window(title, milliseconds, {name: found for name, found in rows.items() if found or name == COMPUTE})


def title_of(report: Report) -> str:
    """Shape and work, then device, date and commit."""
    model, machine, asked = report["model"], report["machine"], report["arguments"]
    network = f"{model['name']}, {model['num_layers']} layers, {model['dtype']}"
    weights = "random weights" if model.get("load_format", "dummy") == "dummy" else "weights of a checkpoint"
    work = f"blocks of {asked['block_size']:,} tokens, steps of {asked['max_num_batched_tokens']:,}"
    device = machine.get("gpu") or f"CPU: {machine['cpu']}, threads: {machine['threads']}"
    commit = f"commit {machine['commit']}" if machine["commit"] else "no commit"
    return f"{network}, {weights}; {work}\n{device}; torch {machine['torch']}; {machine['date'][:10]}; {commit}"


# ---- drawing


def draw(report: Report, trace: Path | None, path: Path) -> None:
    """Write the picture, with timelines if there is a trace. Raises ConfigError."""
    pyplot, results = load_pyplot(), results_of(report)
    by_share = shares(results)
    timelines = windows(Timeline.read(trace)) if trace is not None else []
    heights = [4.0, *(1.0 + 0.22 * len(window.rows) for window in timelines)]
    figure = pyplot.figure(figsize=(14, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(title_of(report))
    grid = figure.add_gridspec(len(heights), 3 if by_share else 2, height_ratios=heights)
    on_device = report["arguments"]["device_share"]
    _draw_speeds(figure.add_subplot(grid[0, 0]), speeds(results, "prefill"), "prefill", on_device)
    decode = speeds(results, "decode")
    decode.pop("offload, chunk-major", None)  # it differs only in prefill
    _draw_speeds(figure.add_subplot(grid[0, 1]), decode, "decode", on_device)
    if by_share:
        _draw_shares(figure.add_subplot(grid[0, 2]), by_share)
    for index, window in enumerate(timelines, start=1):
        _draw_window(figure.add_subplot(grid[index, :]), window)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_speeds(axes: Any, found: Mapping[str, list[Point]], phase: str, on_device: str) -> None:
    for index, (name, points) in enumerate(found.items()):
        label, form = ENGINES[name]
        shifted = [replace(point, x=point.x * APART ** (index - len(found) // 2)) for point in points]
        _draw_points(axes, shifted, form, label.format(share=on_device))
    lengths = sorted({round(point.x) for points in found.values() for point in points})
    axes.set(title=f"{phase} by context length", xlabel="prompt, tokens", ylabel="tokens/s", xscale="log")
    axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    _finish(axes)


def _draw_shares(axes: Any, found: Shares) -> None:
    level = found.on_device
    axes.axhline(level.median, color="C0", linestyle="--", label="KV cache on the device")
    axes.axhspan(level.low, level.high, color="C0", alpha=0.1)
    _draw_points(axes, found.forced, "C2s-", "offload, share forced")
    _draw_points(axes, [found.automatic], "C4*", "offload, share as the engine chooses", markersize=13)
    title = f"decode by the CPU's share, {found.prompt_len:,} tokens"
    axes.set(title=title, xlabel="share of host blocks that the CPU attends to", ylabel="tokens/s")
    _finish(axes)


def _draw_points(axes: Any, points: Sequence[Point], form: str, label: str, **style: Any) -> None:
    medians = [p.median for p in points]
    spread = [[p.median - p.low for p in points], [p.high - p.median for p in points]]
    axes.errorbar([p.x for p in points], medians, yerr=spread, fmt=form, label=label, capsize=3, **style)


def _finish(axes: Any) -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")


def _draw_window(axes: Any, window: Window) -> None:
    """A row for each stream."""
    streams = list(window.rows)
    background = [(0.0, window.milliseconds)]
    seen = {"other computation": axes.broken_barh(background, (streams.index(COMPUTE) - 0.4, 0.8), facecolor=REST)}
    for row, stream in enumerate(streams):
        for kind, bars in window.rows[stream].items():
            seen[kind] = axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=COLOURS.get(kind, "tab:purple"))
    axes.set(title=window.title, xlabel="ms since the step began", xlim=(0, window.milliseconds))
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.legend(seen.values(), seen.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def run(args: argparse.Namespace) -> int:
    try:
        report = json.loads(args.result.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(args.result)!r} cannot be read as JSON: {error}") from error
    draw(report, args.trace, args.picture)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    prog = "python -m benchmarks.offload_plot"
    parser = Parser(prog=prog, description="Draw what bench_offload.py found.")
    parser.add_argument("result", type=Path, help="what bench_offload.py --output-json wrote")
    parser.add_argument("picture", type=new_file, help="file to draw into: .png, .svg or .pdf")
    parser.add_argument("--trace", type=Path, help="what bench_offload.py --trace wrote, for the timeline")
    args = parser.parse_args(argv)
    return exit_status(prog, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
