"""The targets of the GPU check and the values that it measured.

    python -m benchmarks.gpu_bars gpu-check.json [more of them]

Reads the reports of one or more runs; for each part, the last report that has it counts. Exit status 1 if a target is
missed or was not measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Parts = Mapping[str, Mapping[str, Any]]  # outcomes by the name of the part, as in gpu-check.json


@dataclass(frozen=True, slots=True)
class Bar:
    """One target. `value` is None if its part failed or did not measure it."""

    name: str
    part: str
    wanted: float
    at_most: bool
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and (self.value <= self.wanted if self.at_most else self.value >= self.wanted)


@dataclass(frozen=True, slots=True)
class Rule:
    """How to read the value of a target from the parts."""

    name: str
    part: str
    wanted: float
    read: Callable[[Parts], float]
    at_most: bool = False


def _figures(parts: Parts, part: str) -> Any:
    return parts[part]["figures"]


def _only(parts: Parts, part: str) -> Any:
    """The one prompt length of bench_offload.py."""
    (result,) = _figures(parts, part)["results"]
    return result


def _strided_share(parts: Parts) -> float:
    """The worst of all directions and row sizes."""
    results = _figures(parts, "copies")["results"]
    return float(min(r["of_contiguous"]["median"] for r in results if r["way"] == "strided"))


def _merge_times(parts: Parts) -> float:
    return float(max(_figures(parts, "kernels")["kernels"]["merge"], key=lambda row: row["tokens"])["times"])


def _prefill_ratio(part: str) -> Callable[[Parts], float]:
    return lambda parts: float(_only(parts, part)["ratios"]["on device"]["prefill"]["median"])


def _matrix_share(parts: Parts) -> float:
    peak = _figures(parts, "offload-32k")["ceilings"]["matmul_gflop_s"]
    return float(_only(parts, "offload-32k")["prefill_gflop_s"] / peak)


def _link_share(parts: Parts) -> float:
    peak = _figures(parts, "offload-32k")["ceilings"]["copy_gb_s"]["h2d"]
    return float(_only(parts, "offload-32k")["traffic"]["offload"]["decode_h2d_gb_s"] / peak)


def _decode_rate(parts: Parts, part: str) -> float:
    return float(_only(parts, part)["rates"]["offload"]["decode_tok_s"]["median"])


def _cpu_attention_gain(parts: Parts) -> float:
    return _decode_rate(parts, "cpu-attention-32k") / _decode_rate(parts, "offload-32k")


def _narrow_kv_gain(parts: Parts) -> float:
    ratios = _only(parts, "kv-8-bits-32k")["ratios"]["offload, KV in the model's dtype"]
    return float(ratios["decode"]["median"])


def _streamed_prefill(part: str) -> Callable[[Parts], float]:
    """Prefill with weights in host memory beside weights on the device."""
    return lambda parts: float(_only(parts, part)["ratios"]["prefill"]["median"])


def _streamed_decode(part: str) -> Callable[[Parts], float]:
    """What link and host allow, where both read what a token needs of the weights in host memory."""
    return lambda parts: float(_only(parts, part)["decode_share"])


def _idle_share(parts: Parts) -> float:
    gaps = _only(parts, "offload-32k")["kernel_gaps"]["prefill"]
    return float(gaps["idle_s"] / gaps["span_s"])


def _resident(parts: Parts, part: str, prompt: int = 0) -> Any:
    """A prompt length of bench.py."""
    return _figures(parts, part)["results"][prompt]


def _decode_ms(parts: Parts) -> float:
    return float(_resident(parts, "decode-kernels")["rates"]["tpot_s"]["median"]) * 1e3


def _read_share(part: str) -> Callable[[Parts], float]:
    """What a decode step must read, by its time, of what the device reads at most."""
    return lambda parts: _resident(parts, part)["decode_gb_s"] / _figures(parts, part)["peaks"]["read_gb_s"]


def _prefill_of_bf16(part: str) -> Callable[[Parts], float]:
    """Prefill of 4,096 tokens beside the same network in bf16."""

    def rate(parts: Parts, name: str, prompt: int) -> float:
        return float(_resident(parts, name, prompt)["rates"]["prefill_tok_s"]["median"])

    return lambda parts: rate(parts, part, 0) / rate(parts, "decode-kernels", 1)


def _narrow_kv_prefill(parts: Parts) -> float:
    return float(_only(parts, "kv-8-bits-32k")["ratios"]["offload, KV in the model's dtype"]["prefill"]["median"])


def _recall(parts: Parts) -> float:
    right, asked = re.findall(r"(\d+) of (\d+) answers are right", parts["recall-128k"]["output"])[-1]
    return int(right) / int(asked)


Q4 = "llama-3.1-8b-q4_k_m"
QWEN_EXPERTS = "weights-experts"
GPT_EXPERTS = "weights-gpt-oss"
RULES = (
    Rule("strided copy / contiguous", "copies", 0.97, _strided_share),
    Rule("merge at 16K tokens, times PyTorch's", "kernels", 4.3, _merge_times),
    Rule("prefill at 32K, offloaded / resident", "offload-32k", 0.97, _prefill_ratio("offload-32k")),
    Rule("prefill at 128K, offloaded / resident", "offload-128k", 0.97, _prefill_ratio("offload-128k")),
    Rule("prefill at 32K / matrix rate", "offload-32k", 0.60, _matrix_share),
    Rule("streamed decode at 32K / link", "offload-32k", 0.85, _link_share),
    Rule("decode at 32K with CPU attention / streamed", "cpu-attention-32k", 2.0, _cpu_attention_gain),
    Rule("streamed decode at 32K, KV in 8 / 16 bits", "kv-8-bits-32k", 1.7, _narrow_kv_gain),
    Rule("prefill at 32K, KV in 8 / 16 bits", "kv-8-bits-32k", 0.95, _narrow_kv_prefill),
    Rule("resident decode at 2K, ms", "decode-kernels", 4.6, _decode_ms, at_most=True),
    Rule("prefill at 4K, Q4_K_M / bf16", Q4, 0.85, _prefill_of_bf16(Q4)),
    Rule("decode in Q4_K_M / reading", Q4, 0.6, _read_share(Q4)),
    Rule("decode of gpt-oss-20b / reading", "gpt-oss-20b", 0.5, _read_share("gpt-oss-20b")),
    Rule("decode of Qwen3.5-9B / reading", "qwen3.5-9b", 0.7, _read_share("qwen3.5-9b")),
    Rule("prefill at 32K, weights streamed / resident", "weights", 0.90, _streamed_prefill("weights")),
    Rule("prefill at 32K, the same of int4 experts", QWEN_EXPERTS, 0.90, _streamed_prefill(QWEN_EXPERTS)),
    Rule("prefill at 32K, the same of MXFP4 experts", GPT_EXPERTS, 0.90, _streamed_prefill(GPT_EXPERTS)),
    Rule("decode with streamed weights / link and host", "weights", 0.7, _streamed_decode("weights")),
    Rule("decode, the same of int4 experts", QWEN_EXPERTS, 0.7, _streamed_decode(QWEN_EXPERTS)),
    Rule("decode, the same of MXFP4 experts", GPT_EXPERTS, 0.7, _streamed_decode(GPT_EXPERTS)),
    Rule("GPU idle between kernels of prefill", "offload-32k", 0.05, _idle_share, at_most=True),
    Rule("recall at 128K", "recall-128k", 1.0, _recall),
)


def bars(parts: Parts) -> list[Bar]:
    """All targets. Those of a part that failed, was stopped or did not run have no value."""
    judged = []
    for rule in RULES:
        try:
            value = rule.read(parts)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
            value = None
        judged.append(Bar(rule.name, rule.part, rule.wanted, rule.at_most, value))
    return judged


def show(bars: Sequence[Bar]) -> None:
    for bar in bars:
        value = "-" if bar.value is None else f"{bar.value:.3f}"
        verdict = "not measured" if bar.value is None else "met" if bar.met else "MISSED"
        print(f"{bar.name:<46}{value:>9}   {'<=' if bar.at_most else '>='} {bar.wanted:<6}{verdict}")


def parts_of(paths: Sequence[Path]) -> dict[str, Any]:
    """The outcomes of all reports by part; the last report that has a part counts."""
    return {outcome["part"]: outcome for path in paths for outcome in json.loads(path.read_text())["parts"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_bars", description="The GPU check's bars.")
    parser.add_argument("reports", type=Path, nargs="+", help="gpu-check.json of one run or several")
    judged = bars(parts_of(parser.parse_args(argv).reports))
    show(judged)
    return 0 if all(bar.met for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
