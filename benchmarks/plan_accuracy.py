"""The planner's predictions against measurements: prefill time and decode rate, resident and offloaded.

    python -m benchmarks.plan_accuracy [--num-layers 2 4] [--prompt-len 2048 8192] [--output-json FILE]

In every round of a configuration, the machine's rates are measured as by `nanovllm plan`, on layers with random
weights. Then the prediction is made and the engine runs. A prediction is compared with the run that follows it, since
the rates of a shared machine may change by a factor of two within minutes. Offloaded decode runs with CPU attention
(`offload`) and without it (`streamed`). Figures are medians over the rounds. The defaults take about ten minutes on two
cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks.engine import Work, device_name, generate, timing_of
from benchmarks.options import (
    Parser,
    add_device_option,
    add_engine_options,
    add_run_options,
    positive,
    share,
)
from benchmarks.other_load import OtherLoad
from benchmarks.report import machine_facts, print_facts, print_other_load, write_json
from benchmarks.shapes import Shape, open_shape
from benchmarks.timing import Spread
from nanovllm.config import DTYPES, MIN_GPU_BLOCKS
from nanovllm.device import create_device
from nanovllm.errors import ConfigError
from nanovllm.features.planner.measure import Probe, ProbeSizes, measure_rates, random_model
from nanovllm.features.planner.predict import Prediction, Rates
from nanovllm.memory.budget import split_device
from nanovllm.memory.layout import KVLayout
from nanovllm.ops import select_backend

PLACEMENTS = ("resident", "offload", "streamed")  # offload with CPU attention, and without it


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of a prefill or of one decoded token."""

    predicted: Spread
    measured: Spread
    error: Spread  # of the predicted speed, relative to the measured one; above 0, the prediction is too fast
    limit: str
    by_resource: dict[str, float]

    @classmethod
    def of(cls, predictions: Sequence[Prediction], measured: Sequence[float]) -> Phase:
        """A prediction and the measurement after it, in every round."""
        seconds = [prediction.seconds for prediction in predictions]
        limit = predictions[-1].limit
        assert limit is not None, "all rates are measured"
        errors = [took / said - 1 for took, said in zip(measured, seconds, strict=True) if said is not None]
        spreads = [Spread.of(values) for values in (seconds, measured, errors)]
        predicted, took, error = (spread for spread in spreads if spread is not None)
        return cls(predicted, took, error, limit, predictions[-1].terms)


@dataclass(frozen=True, slots=True)
class Result:
    """One configuration."""

    num_layers: int
    placement: str
    prompt_len: int
    streamed_bytes: int
    cpu_attention_bytes: float  # of them, those that the CPU attends to in a decode step
    prefill: Phase
    decode: Phase
    rates: Rates  # of the last round


def measure(work: Work, placement: str, args: argparse.Namespace) -> Result:
    """Rates, prediction and run of one configuration, in every round."""
    (prompt,) = work.shape.prompts(1, work.prompt_len, args.seed)
    requests = []
    runs = []
    with work.open(**arguments_for(work, placement, args.device_share)) as llm:
        for _ in range(args.warmup):
            generate(llm, [prompt], work.output_len)
        for _ in range(args.repeats):
            rates = rates_for(work, offload=placement != "resident")
            requests.append(llm.plan(rates).request(work.prompt_len, work.output_len))
            runs.append(timing_of(generate(llm, [prompt], work.output_len)))
    return Result(
        num_layers=work.shape.spec.num_layers,
        placement=placement,
        prompt_len=work.prompt_len,
        streamed_bytes=requests[-1].streamed_bytes,
        cpu_attention_bytes=requests[-1].cpu_attention_bytes or 0.0,
        prefill=Phase.of([request.prefill for request in requests], [run.prefill_seconds for run in runs]),
        decode=Phase.of([request.decode for request in requests], [run.tpot or 0.0 for run in runs]),
        rates=rates,
    )


def rates_for(work: Work, *, offload: bool) -> Rates:
    """Measured as `nanovllm plan` does."""
    spec = work.shape.spec
    sizes = ProbeSizes()
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, work.block_size, work.shape.dtype.itemsize)
    ring_slots = split_device(0, spec.num_layers, layout.block_layer_bytes).ring_slots if offload else 0
    with closing(create_device(work.device)) as device:
        model = random_model(spec, work.shape.dtype, device, sizes)
        backend = select_backend(device.torch_device, spec.head_dim)
        chunk = work.max_num_batched_tokens
        return measure_rates(Probe(device, model, backend, work.block_size, ring_slots, chunk, sizes))


def arguments_for(work: Work, placement: str, device_share: Fraction) -> dict[str, Any]:
    """The numbers of blocks; with offload, at least as many on the device as the engine needs."""
    if placement == "resident":
        return work.on_device()
    blocks = work.offloaded(max(device_share, Fraction(MIN_GPU_BLOCKS, work.num_blocks)))
    return blocks | {"cpu_attention": placement == "offload"}


# ---- text

COLUMNS = "{:>6}  {:<9}{:>8}   {:>10}{:>10}{:>7}   {:>10}{:>10}{:>7}   {}".format


def show_head() -> None:
    print(COLUMNS("", "", "", "prefill", "", "", "decode", "", "", ""))
    head = ("predicted", "measured", "off by")
    print(COLUMNS("layers", "placement", "prompt", *head, *head, "limits, prefill and decode"))


def show(result: Result) -> None:
    prefill = result.prefill
    decode = result.decode
    print(
        COLUMNS(
            result.num_layers, result.placement, f"{result.prompt_len:,}",
            f"{prefill.predicted.median:.2f} s", f"{prefill.measured.median:.2f} s", f"{prefill.error.median:+.0%}",
            f"{1 / decode.predicted.median:.1f}/s", f"{1 / decode.measured.median:.1f}/s",
            f"{decode.error.median:+.0%}",
            f"{prefill.limit}, {decode.limit}",
        ),
        flush=True,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.output_len < 2:
        raise ConfigError("--output-len must be at least 2: the first token is the prefill's")
    facts = machine_facts(device_name(args.device))
    load = OtherLoad()
    results = []
    models = []
    for num_layers in args.num_layers:
        with open_shape(args.model, num_layers, args.dtype) as shape:
            models.append(shape.facts())
            print_facts(facts, shape.facts())
            show_head()
            results += measure_shape(shape, args)
            print()
    errors = [abs(phase.error.median) for result in results for phase in (result.prefill, result.decode)]
    print(
        f"speeds predicted within {max(errors):.0%} of measured, {sorted(errors)[len(errors) // 2]:.0%} in the middle"
    )
    print_other_load(load.share())
    write_json(args.output_json, args, facts, models=models, results=results, errors=errors, other_load=load.share())
    return 0


def measure_shape(shape: Shape, args: argparse.Namespace) -> list[Result]:
    results = []
    for placement in PLACEMENTS:
        for prompt_len in args.prompt_len:
            work = Work.of(shape, args, prompt_len, args.output_len)
            results.append(measure(work, placement, args))
            show(results[-1])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="benchmarks.plan_accuracy", description="Predicted against measured speeds.")
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a published name, or a directory with a config.json")
    add("--num-layers", type=positive, nargs="+", default=[2, 4], help="layers to keep; several are run in turn")
    add("--dtype", choices=DTYPES, default="auto", help="of weights and KV cache (default: the config's)")
    add("--prompt-len", type=positive, nargs="+", default=[2048, 8192], help="tokens; several are run in turn")
    add("--device-share", type=share, default=Fraction(1, 4), help="KV blocks on the device (default: %(default)s)")
    add_run_options(parser, output_len=33, repeats=5)
    add_engine_options(parser, block_size=256, max_batched=4096)
    add_device_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
