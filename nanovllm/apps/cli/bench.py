"""`nanovllm bench`: prefill and decode rates of one engine over repeated runs.

Prompts are random token ids, so no tokenizer is needed, and with `--load-format dummy` no weights. bench.py in the
repository also measures the machine's peaks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanovllm.apps.cli.arguments import (
    TOKENS,
    add_command,
    add_engine_flags,
    add_progress_flag,
    checked_config,
    not_negative,
    positive,
    positive_tokens,
)
from nanovllm.apps.cli.boundary import Interrupt
from nanovllm.apps.cli.engine import load_llm
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.progress_bar import Meter, ProgressDisplay, StatusLine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm import LLM

DEFAULTS = {"enable_prefix_caching": False}  # no run reuses the KV of another


FIGURES = {  # label, unit, factor, digits
    "prefill_tok_s": ("prefill", "tok/s", 1.0, 1),
    "decode_tok_s": ("decode", "tok/s", 1.0, 1),
    "ttft_s": ("TTFT", "s", 1.0, 3),
    "tpot_s": ("TPOT", "ms", 1e3, 1),
}


def figures_of(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """The `FIGURES` of requests that arrived together; times in seconds, rates in tokens per second.

    Prefill lasts from the first request's first step to the last request's first token, decode from the first
    request's first token to the end. The two overlap if several requests need more than one step. TTFT and TPOT are
    medians over the requests. None: there are no tokens but the first of each request.
    """
    metrics = [output.metrics for output in outputs]
    first = [_known(m.first_token_time) for m in metrics]
    prefill_seconds = max(first) - min(_known(m.first_scheduled_time) for m in metrics)
    decode_seconds = max(_known(m.finished_time) for m in metrics) - min(first)
    decoded = sum(m.decode_tokens for m in metrics)
    tpots = [m.tpot for m in metrics if m.tpot is not None]
    return {
        "prefill_tok_s": sum(len(output.prompt_token_ids) for output in outputs) / prefill_seconds,
        "decode_tok_s": decoded / decode_seconds if decoded else None,
        "ttft_s": statistics.median(_known(m.ttft) for m in metrics),
        "tpot_s": statistics.median(tpots) if tpots else None,
    }


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """The command's options."""
    parser = add_command(
        subparsers,
        "bench",
        summary,
        "Measures prefill and decode with random prompts, each prompt length in turn: medians over the counted runs, "
        "and their extremes. Prefix caching is off unless requested.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    tokens: dict[str, Any] = {"type": positive_tokens, "metavar": "N"}
    add("--prompt-len", nargs="+", default=[512, 2048], help=f"tokens, {TOKENS} (default: 512 2048)", **tokens)
    add("--output-len", default=32, help=f"tokens, {TOKENS} (default: %(default)s)", **tokens)
    add("--num-prompts", type=positive, default=1, metavar="N", help="requests at once (default: %(default)s)")
    add("--repeats", type=positive, default=3, metavar="N", help="counted runs (default: %(default)s)")
    add("--warmup", type=not_negative, default=1, metavar="N", help="warm-up runs (default: %(default)s)")
    add("--json", action="store_true", help="all figures as one JSON object")
    add_progress_flag(parser)
    add_engine_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    checked_config(args, **DEFAULTS)
    results: list[dict[str, Any]] = []
    with StatusLine(args.progress) as status, load_llm(args, status, Interrupt(), **DEFAULTS) as llm:
        _check_lengths(args, llm)
        for prompt_len in args.prompt_len:
            runs = _measure(args, llm, prompt_len, status)
            results.append(_summary(args, prompt_len, runs))
            if not args.json:
                _show(results[-1])
        if args.json:
            print(json.dumps(_report(args, llm, results), indent=2, allow_nan=False))
    return 0


def _check_lengths(args: argparse.Namespace, llm: LLM) -> None:
    """Check all lengths before the first run. Raises ConfigError, with what would make them fit."""
    longest = max(args.prompt_len) + args.output_len
    if longest > llm.max_model_len:
        advice = llm.engine.executor.advise(longest)
        raise ConfigError(
            f"--prompt-len {max(args.prompt_len)} and --output-len {args.output_len} make {longest} tokens, and "
            f"max_model_len is {llm.max_model_len}: {advice.text}",
            advice.changes,
        )


def _measure(args: argparse.Namespace, llm: LLM, prompt_len: int, status: StatusLine) -> list[dict[str, Any]]:
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    runs: list[dict[str, Any]] = []
    for index in range(args.warmup + args.repeats):
        prefix = f"{prompt_len:,} tokens: run {index + 1} of {args.warmup + args.repeats}, "
        rng = random.Random(f"{llm.config.seed}-{prompt_len}-{index}")
        vocab = range(llm.engine.facts.vocab_size)
        prompts = [rng.choices(vocab, k=prompt_len) for _ in range(args.num_prompts)]
        with ProgressDisplay(status, Meter(args.num_prompts), llm.engine.progress, llm.watch_steps, prefix):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            raise EngineError(error)
        runs.append(figures_of(outputs))
    return runs[args.warmup :]


def _known(value: float | None) -> float:
    assert value is not None, "the request has finished"
    return value


# ---- reports


def _summary(args: argparse.Namespace, prompt_len: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    work = {"prompt_len": prompt_len, "output_len": args.output_len, "num_prompts": args.num_prompts}
    spreads: dict[str, Any] = {}
    for name in FIGURES:
        values = [run[name] for run in runs if run[name] is not None]
        spread = {"median": statistics.median(values), "low": min(values), "high": max(values)} if values else None
        spreads[name] = spread
    return work | spreads | {"runs": runs}


def _show(summary: dict[str, Any]) -> None:
    print(f"{summary['num_prompts']} x {summary['prompt_len']:,} tokens in, {summary['output_len']:,} out")
    for name, (label, unit, factor, digits) in FIGURES.items():
        spread = summary[name]
        if spread is None:
            print(f"{label:<10}{'-':>14}")
            continue
        median, low, high = (f"{spread[key] * factor:,.{digits}f}" for key in ("median", "low", "high"))
        print(f"{label:<10}{median:>14} {unit:<6} {low} to {high}")
    print(flush=True)


def _report(args: argparse.Namespace, llm: LLM, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    import torch

    import nanovllm

    return {
        "model": args.model,
        "engine": {name: value for name, value in asdict(llm.config).items() if name != "model"},
        "kv": asdict(llm.kv_stats()),
        "nanovllm": nanovllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repeats": args.repeats,
        "warmup": args.warmup,
        "results": list(results),
    }
