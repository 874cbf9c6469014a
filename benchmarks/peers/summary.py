"""Figures from results: medians, shares of the roofline, ratios within rounds, and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.driver import Findings, Plan
from benchmarks.report import MIB
from benchmarks.shapes import Shape
from benchmarks.timing import Spread

SUBJECT = "nanovllm"
PHASES = ("prefill", "decode")


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


@dataclass(frozen=True, slots=True)
class Bar:
    """A target for nanovllm's speed or memory. `against`: an engine, "roofline" or "memory".

    limit: the least ratio of nanovllm's speed to the other's; for "memory", the MiB besides weights and KV cache below
    which the peak must stay.
    """

    prompt_len: int
    phase: str
    against: str
    limit: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a target. `value` and `reached` are None if it was not measured."""

    bar: Bar
    value: Spread | None
    reached: bool | None


# Set for qwen3-0.6b with all its layers on two cores.
BARS = (
    Bar(512, "prefill", "vllm", 1.0),
    Bar(512, "decode", "vllm", 1.0),
    Bar(8192, "prefill", "vllm", 1.3),
    Bar(8192, "prefill", "roofline", 0.70),
    Bar(8192, "decode", "vllm", 1.5),
    Bar(8192, "decode", "transformers", 6.0),
    Bar(8192, "decode", "roofline", 0.75),
    *(Bar(length, phase, "llama.cpp", 1.0) for length in (512, 2048, 8192) for phase in PHASES),
    Bar(32768, "memory", "memory", 700.0),
)
# Where nanovllm multiplies bf16 without bf16 instructions, since they are slow there.
BARS_WITHOUT_BF16 = tuple(
    Bar(length, "prefill", against, limit)
    for length in (512, 2048)
    for against, limit in (("vllm", 1.4), ("llama.cpp", 2.0), ("roofline", 0.80))
)


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
    found = []
    for prompt_len in sorted(plan.prompt_lens):
        for engine in plan.engines:
            runs = [run for run in findings.runs.get((engine, prompt_len), []) if run is not None]
            roofs = [Roofline.of(shape, prompt_len, plan.output_len, run["ceiling"]) for run in runs]
            if runs:
                found.append(_row(engine, prompt_len, runs, roofs, _tokens(findings, SUBJECT, prompt_len)))
    return found


def _row(
    engine: str, prompt_len: int, runs: list[dict[str, Any]], roofs: list[Roofline], tokens: list[int] | None
) -> Row:
    prefill, tpot = spread_of(runs, "prefill_s"), spread_of(runs, "tpot_s")
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


def verdicts(shape: Shape, plan: Plan, findings: Findings, bf16_isa: str) -> list[Verdict]:
    """All targets, by medians: reached, missed or not measured. bf16_isa: of nanovllm's bf16 products."""
    measured = {(row.engine, row.prompt_len): row for row in rows(shape, plan, findings)}
    bars = (*BARS, *BARS_WITHOUT_BF16) if bf16_isa == "avx512" else BARS
    return [_verdict(bar, shape, plan, findings, measured.get((SUBJECT, bar.prompt_len))) for bar in bars]


def _verdict(bar: Bar, shape: Shape, plan: Plan, findings: Findings, row: Row | None) -> Verdict:
    if row is None:
        return Verdict(bar, None, None)
    if bar.against == "memory":
        beyond = memory_beyond(shape, bar.prompt_len, plan.output_len, row.peak_rss_bytes) / MIB
        return Verdict(bar, Spread(beyond, beyond, beyond), beyond < bar.limit)
    if bar.against == "roofline":
        value = row.prefill_share if bar.phase == "prefill" else row.decode_share
    else:
        value = ratio(findings, bar.against, bar.prompt_len, bar.phase)
    return Verdict(bar, value, None if value is None else value.median >= bar.limit)


def memory_beyond(shape: Shape, prompt_len: int, output_len: int, peak_rss_bytes: int) -> int:
    """Bytes of the peak that are neither weights nor the sequence's KV. The last token has no KV."""
    return peak_rss_bytes - shape.weight_bytes - (prompt_len + output_len - 1) * shape.kv_token_bytes
