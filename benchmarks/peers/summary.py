"""Figures from results: medians, shares of the roofline, ratios within rounds; and their tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.driver import Findings, Plan
from benchmarks.report import mib, scaled
from benchmarks.shapes import Shape
from benchmarks.timing import Spread

SUBJECT = "nanovllm"
PHASES = ("prefill", "decode")
HEAD = ("prompt", "engine", "prefill tok/s", "of roof", "decode ms/token", "of roof", "peak memory", "same tokens")


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least seconds that the ceilings allow at one prompt length: operations over the matrix rate, and bytes of
    weights and KV, in the middle of the output, over the read bandwidth."""

    prefill_s: float
    tpot_s: float

    @classmethod
    def of(cls, shape: Shape, prompt_len: int, output_len: int, ceiling: dict[str, float]) -> Roofline:
        return cls(
            prefill_s=shape.prefill_operations(prompt_len) / ceiling["matmul_flop_s"],
            tpot_s=shape.decode_bytes(prompt_len + output_len // 2) / ceiling["read_bytes_s"],
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one prompt length. Shares are of the roofline's speed, by the ceilings of each run."""

    engine: str
    prompt_len: int
    prefill_s: Spread
    tpot_s: Spread | None
    peak_rss_bytes: int
    prefill_share: Spread
    decode_share: Spread | None
    same_tokens: int | None  # number of leading output tokens that equal those of nanovllm

    @property
    def prefill_tok_s(self) -> Spread:
        return Spread(*(self.prompt_len / s for s in (self.prefill_s.median, self.prefill_s.high, self.prefill_s.low)))


def spread_of(runs: Sequence[dict[str, Any] | None], name: str) -> Spread | None:
    return Spread.of(run[name] for run in runs if run is not None)


def ratio(findings: Findings, engine: str, prompt_len: int, phase: str) -> Spread | None:
    """nanovllm's speed over `engine`'s in each round that has both; above 1, nanovllm is faster."""
    name = "prefill_s" if phase == "prefill" else "tpot_s"
    ours, theirs = (findings.runs.get((e, prompt_len), []) for e in (SUBJECT, engine))
    pairs = [(a[name], b[name]) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    return Spread.of(b / a for a, b in pairs if a is not None and b is not None)


def rows(shape: Shape, plan: Plan, findings: Findings) -> list[Row]:
    """A summary for each engine and prompt length with results, in order of prompt lengths."""
    table = []
    for prompt_len in sorted(plan.prompt_lens):
        for engine in plan.engines:
            runs = [run for run in findings.runs.get((engine, prompt_len), []) if run is not None]
            roofs = [Roofline.of(shape, prompt_len, plan.output_len, run["ceiling"]) for run in runs]
            if runs:
                table.append(_row(engine, prompt_len, runs, roofs, _tokens(findings, SUBJECT, prompt_len)))
    return table


def _row(
    engine: str, prompt_len: int, runs: list[dict[str, Any]], roofs: list[Roofline], tokens: list[int] | None
) -> Row:
    prefill = spread_of(runs, "prefill_s")
    tpot = spread_of(runs, "tpot_s")
    pairs = list(zip(roofs, runs, strict=True))
    prefill_share = Spread.of(roof.prefill_s / run["prefill_s"] for roof, run in pairs)
    assert prefill is not None and prefill_share is not None, "every result has a prefill"
    return Row(
        engine=engine,
        prompt_len=prompt_len,
        prefill_s=prefill,
        tpot_s=tpot,
        peak_rss_bytes=max(run["peak_rss_bytes"] for run in runs),
        prefill_share=prefill_share,
        decode_share=Spread.of(roof.tpot_s / run["tpot_s"] for roof, run in pairs if run["tpot_s"] is not None),
        same_tokens=None if tokens is None else common_prefix(runs[0]["tokens"], tokens),
    )


def _tokens(findings: Findings, engine: str, prompt_len: int) -> list[int] | None:
    runs = findings.runs.get((engine, prompt_len), [])
    return next((run["tokens"] for run in runs if run is not None), None)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))


# ---- as Markdown


def markdown(
    shape: Shape,
    plan: Plan,
    findings: Findings,
    facts: Mapping[str, Any],
    rows: Sequence[Row],
) -> str:
    """The complete report."""
    model = shape.facts()
    parts = [
        f"# {model['name']}, {model['num_layers']} layers, {model['dtype']}, random weights, on the CPU\n",
        f"{facts['cpu']}, {facts['cores']} threads, {facts['date']}, commit {facts['commit'] or 'unknown'}.",
        f"{SUBJECT}'s kernels: {facts['cpu_kernels']}.",
        f"{plan.output_len} tokens out, greedy, rounds: {max(map(len, findings.runs.values()), default=0)}, each run in"
        " a process of its own; medians, extremes in brackets. Peak memory adds up the processes of an engine.",
        "Ceilings, measured before the first run and after each: torch.mm in its fastest dtype"
        f" {_range(findings, 'matmul_flop_s', '{:,.0f}')} GFLOP/s, torch.sum"
        f" {_range(findings, 'read_bytes_s', '{:,.1f}')} GB/s. Shares are of the better of the two around a run; the"
        " roofline's own line is the best of all. Same tokens: how many of the output, from the first on, are"
        f" {SUBJECT}'s; with random weights one rounding can turn all that follow.\n",
        _versions(plan, findings),
        results(shape, plan, findings, rows),
        ratios(plan, findings),
        failures(findings),
    ]
    return "\n".join(part for part in parts if part)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with columns of equal width, so that it is also readable as plain text."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    rule = ["-" * width for width in widths]

    def padded(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"

    return "".join(map(padded, (head, rule, *lines)))


def results(shape: Shape, plan: Plan, findings: Findings, rows: Sequence[Row]) -> str:
    """A line for each engine and prompt length, and one for the ceilings."""
    lines: list[list[str]] = []
    for prompt_len in sorted({row.prompt_len for row in rows}):
        lines += [_result(row) for row in rows if row.prompt_len == prompt_len]
        roof = Roofline.of(shape, prompt_len, plan.output_len, findings.ceiling)
        speeds = [f"{prompt_len / roof.prefill_s:,.0f}", "", f"{roof.tpot_s * 1e3:,.1f}"]
        lines.append([str(prompt_len), "roofline", *speeds, "", "", ""])
    return table(HEAD, lines)


def _result(row: Row) -> list[str]:
    return [
        str(row.prompt_len),
        row.engine,
        spread(row.prefill_tok_s, "{:,.0f}"),
        spread(row.prefill_share, "{:.0%}"),
        spread(scaled(row.tpot_s, 1e3), "{:,.1f}"),
        spread(row.decode_share, "{:.0%}"),
        mib(row.peak_rss_bytes),
        "-" if row.same_tokens is None else str(row.same_tokens),
    ]


def ratios(plan: Plan, findings: Findings) -> str:
    """The ratio of nanovllm's speed to each peer's in each round."""
    lines = []
    for prompt_len in sorted(plan.prompt_lens):
        for engine in plan.engines:
            found = [ratio(findings, engine, prompt_len, phase) for phase in PHASES]
            if engine != SUBJECT and any(found):
                lines.append([str(prompt_len), engine, *(spread(r, "{:.2f}") for r in found)])
    return table(("prompt", f"{SUBJECT} over", "prefill", "decode"), lines) if lines else ""


def _range(findings: Findings, name: str, form: str) -> str:
    """The lowest and the highest value, in billions."""
    low, high = (form.format(pick(c[name] for c in findings.ceilings) / 1e9) for pick in (min, max))
    return f"{low} to {high}"


def failures(findings: Findings) -> str:
    lines = [f"- {name}: {sentence}" for name, sentence in findings.failures.items()]
    return "Not run:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _versions(plan: Plan, findings: Findings) -> str:
    versions = {
        engine: run["version"] for (engine, _), runs in findings.runs.items() for run in runs if run is not None
    }
    return ", ".join(f"{engine} {versions[engine]}" for engine in plan.engines if engine in versions) + ".\n"


def spread(value: Spread | None, form: str) -> str:
    """The median, and the extremes if they differ from it as printed."""
    if value is None:
        return "-"
    median, low, high = (form.format(v) for v in (value.median, value.low, value.high))
    return median if low == high else f"{median} [{low}, {high}]"
