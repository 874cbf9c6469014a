"""What several ranks cost: decode steps of one rank and of several, and the sums over the ranks alone.

    python -m benchmarks.ranks [--ranks 2] [--device cuda] [--model llama-3.1-8b] [--output-json FILE]

A decode step of N ranks takes a rank's share of the work, two sums a layer and one after the embedding, and what the
engine adds: the batch to every rank and the result back. The overhead is the step of N ranks without that share (the
step of one rank / N; on the CPU the whole step, since one rank alone uses all cores) and without the sums, which are
timed between processes without an engine. The tokens of both engines are compared. On CUDA every rank needs a GPU; with
too few the benchmark says so and ends well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

from benchmarks.engine import device_name, generate, timing_of
from benchmarks.options import Parser, add_device_option, add_json_option, add_model_options, positive
from benchmarks.report import machine_facts, print_row, write_json
from benchmarks.shapes import Shape, open_shape
from nanovllm import LLM
from nanovllm.build import build_runner
from nanovllm.config import EngineConfig
from nanovllm.features.distributed import launch
from nanovllm.features.distributed.group import ProcessGroup
from nanovllm.features.distributed.rank import LOAD_TIME, LOOPBACK, RankSetup, join, with_device
from nanovllm.models.network_config import NetworkConfig

# sums
WARMUP = 20
REPEATS = 200


def time_sums(connection: Connection, setup: RankSetup, rows: Sequence[int], width: int, dtype: torch.dtype) -> None:
    """The main function of a rank: sends the median seconds of a sum of [rows, width], for each number of rows."""
    torch.set_num_threads(max(1, setup.threads // setup.local_size))
    config = with_device(setup)
    join(config, setup)
    group = ProcessGroup(setup.rank, setup.size, setup.local_size, setup.connect(LOAD_TIME))
    device = torch.device(config.device or "cpu")
    seconds = [_seconds_of_sum(group, torch.ones(count, width, dtype=dtype, device=device)) for count in rows]
    dist.destroy_process_group()
    connection.send(seconds)


def _seconds_of_sum(group: ProcessGroup, x: torch.Tensor) -> float:
    seconds = []
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        group.all_reduce(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARMUP:])


def sums_alone(config: EngineConfig, network: NetworkConfig, rows: Sequence[int], dtype: torch.dtype) -> list[float]:
    """Seconds of a sum of [rows, hidden size] over `tensor_parallel_size` ranks, for each number of rows."""
    context = get_context("spawn")
    size = config.tensor_parallel_size
    width = network.config.hidden_size
    store, port = launch.local_store()
    ranks = []
    for rank in range(size):
        own, other = context.Pipe()
        setup = RankSetup(config, network, build_runner, rank, rank, size, LOOPBACK, port)
        process = context.Process(target=time_sums, args=(other, setup, rows, width, dtype), daemon=True)
        process.start()
        other.close()
        ranks.append((own, process))
    seconds: list[float] = ranks[0][0].recv()
    for _, process in ranks:
        process.join()
    del store  # not before the ranks have ended
    return seconds


def decode_steps(shape: Shape, args: argparse.Namespace, size: int) -> tuple[float, list[list[int]]]:
    """Seconds of a decode step of `size` ranks, and the tokens."""
    prompts = shape.prompts(args.num_prompts, args.prompt_len, seed=0)
    with LLM(shape.path, **_arguments(shape, args, size)) as llm:
        generate(llm, prompts, args.output_len)
        outputs = generate(llm, prompts, args.output_len)
    seconds = timing_of(outputs).tpot
    assert seconds is not None, "--output-len is at least 2"
    return seconds, [output.outputs[0].token_ids for output in outputs]


def _arguments(shape: Shape, args: argparse.Namespace, size: int) -> dict[str, Any]:
    return {
        "load_format": shape.load_format,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "device": args.device,
        "tensor_parallel_size": size,
        "max_model_len": args.prompt_len + args.output_len,
        "max_num_seqs": args.num_prompts,
        "enable_prefix_caching": False,
        "swap_space": 0,
    }


def run(args: argparse.Namespace) -> int:
    name = device_name(args.device)
    size = args.ranks
    facts = machine_facts(name)
    if name == "cuda" and torch.cuda.device_count() < size:
        skipped = f"{size} ranks need {size} GPUs, and this machine has {torch.cuda.device_count()}"
        print(f"skipped: {skipped}")
        write_json(args.output_json, args, facts, skipped=skipped)
        return 0
    with open_shape(args.model, args.num_layers, args.dtype) as shape:
        config = EngineConfig(model=str(shape.path), **_arguments(shape, args, size))
        rows = [args.num_prompts, 1024]
        few, many = sums_alone(config, shape.config, rows, shape.dtype)
        one, expected = decode_steps(shape, args, 1)
        several, tokens = decode_steps(shape, args, size)
        sums = (2 * shape.network.num_layers + 1) * few
    share = one if name == "cpu" else one / size
    overhead = several - share - sums
    print_row(f"a sum of {rows[0]} rows", f"{few * 1e6:,.0f} us")
    print_row(f"a sum of {rows[1]:,} rows", f"{many * 1e6:,.0f} us")
    print_row("a decode step of one rank", f"{one * 1e3:,.2f} ms")
    print_row(
        f"of {size} ranks", f"{several * 1e3:,.2f} ms", f"sums {sums * 1e3:,.2f} ms, overhead {overhead * 1e3:,.2f} ms"
    )
    same = sum(a == b for a, b in zip(expected, tokens, strict=True))
    print_row("prompts with the same tokens", f"{same} of {len(tokens)}", "in bfloat16 a near tie may differ")
    figures = {"sum_s": few, "large_sum_s": many, "one_rank_step_s": one, "step_s": several, "overhead_s": overhead}
    write_json(args.output_json, args, facts, model=shape.facts(), same=same, **figures)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.ranks", description=__doc__.splitlines()[0])
    add_device_option(parser)
    add_model_options(parser, num_layers=None)
    parser.add_argument("--ranks", type=positive, default=2, help="default: %(default)s")
    parser.add_argument("--num-prompts", type=positive, default=1, help="in a step (default: %(default)s)")
    parser.add_argument("--prompt-len", type=positive, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=positive, default=64, help="tokens (default: %(default)s)")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
