"""Plots both speeds and their ceilings over the prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.driver import Findings, Plan
from benchmarks.peers.summary import Roofline, Row
from benchmarks.plotting import load_pyplot
from benchmarks.shapes import Shape
from nanovllm.errors import ConfigError


def draw(shape: Shape, plan: Plan, findings: Findings, rows: Sequence[Row], path: Path) -> bool:
    """Write a picture to `path`; returns False, without writing, if matplotlib is missing."""
    try:
        pyplot = load_pyplot()
    except ConfigError:
        return False
    figure, (prefill, decode) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    _lines(prefill, rows, [(row, row.prefill_tok_s.median) for row in rows])
    _lines(decode, rows, [(row, 1 / row.tpot_s.median) for row in rows if row.tpot_s is not None])
    lengths = sorted({row.prompt_len for row in rows})
    roofs = [Roofline.of(shape, n, plan.output_len, findings.ceiling) for n in lengths]
    ceiling = {"color": "black", "linestyle": "--", "label": "what the ceilings allow"}
    prefill.plot(lengths, [n / roof.prefill_s for n, roof in zip(lengths, roofs, strict=True)], **ceiling)
    decode.plot(lengths, [1 / roof.tpot_s for roof in roofs], **ceiling)
    for axes, title in ((prefill, "prefill, tokens/s"), (decode, "decode, tokens/s")):
        axes.set(title=title, xlabel="prompt tokens", xscale="log", ylim=(0, None))
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.legend()
    figure.suptitle(f"{shape.name}, {shape.spec.num_layers} layers, bf16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _lines(axes: Any, rows: Sequence[Row], points: Sequence[tuple[Row, float]]) -> None:
    for engine in dict.fromkeys(row.engine for row in rows):
        mine = [(row.prompt_len, speed) for row, speed in points if row.engine == engine]
        axes.plot(*zip(*mine, strict=True), marker="o", label=engine) if mine else None
