"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.driver import Findings, Plan
from benchmarks.peers.summary import PHASES, SUBJECT, Bar, Roofline, Row, Verdict, ratio
from benchmarks.report import mib, scaled
from benchmarks.shapes import Shape
from benchmarks.timing import Spread

HEAD = ("prompt", "engine", "prefill tok/s", "of roof", "decode ms/token", "of roof", "peak memory", "same tokens")


def markdown(
    shape: Shape,
    plan: Plan,
    findings: Findings,
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
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
        bars(verdicts),
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


def bars(verdicts: Sequence[Verdict]) -> str:
    """The targets and whether they were reached."""
    lines = [[bar_name(v.bar), _wanted(v.bar), _value(v), _word(v.reached)] for v in verdicts]
    return table(("bar", "wanted", "measured", "verdict"), lines)


def bar_name(bar: Bar) -> str:
    if bar.against == "memory":
        return f"{bar.prompt_len}: peak beyond weights and KV"
    return f"{bar.prompt_len}: {bar.phase} {'of' if bar.against == 'roofline' else 'over'} {bar.against}"


def _wanted(bar: Bar) -> str:
    if bar.against == "memory":
        return f"< {bar.limit:.0f} MiB"
    return f">= {bar.limit:.0%}" if bar.against == "roofline" else f">= {bar.limit:.1f}"


def _value(verdict: Verdict) -> str:
    if verdict.value is None:
        return "-"
    if verdict.bar.against == "memory":
        return f"{verdict.value.median:,.0f} MiB"
    return spread(verdict.value, "{:.0%}" if verdict.bar.against == "roofline" else "{:.2f}")


def _range(findings: Findings, name: str, form: str) -> str:
    """The lowest and the highest value, in billions."""
    low, high = (form.format(pick(c[name] for c in findings.ceilings) / 1e9) for pick in (min, max))
    return f"{low} to {high}"


def _word(reached: bool | None) -> str:
    return {None: "not measured", True: "reached", False: "missed"}[reached]


def failures(findings: Findings) -> str:
    lines = [f"- {name}: {sentence}" for name, sentence in findings.failures.items()]
    return "Not run:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _versions(plan: Plan, findings: Findings) -> str:
    found = {engine: run["version"] for (engine, _), runs in findings.runs.items() for run in runs if run is not None}
    return ", ".join(f"{engine} {found[engine]}" for engine in plan.engines if engine in found) + ".\n"


def spread(value: Spread | None, form: str) -> str:
    """The median, and the extremes if they differ from it as printed."""
    if value is None:
        return "-"
    median, low, high = (form.format(v) for v in (value.median, value.low, value.high))
    return median if low == high else f"{median} [{low}, {high}]"
