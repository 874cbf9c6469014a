"""What HTTP costs: 64 short requests through `nanovllm serve` against the same through `LLM.generate`.

    python -m benchmarks.serving --model DIR [--repeats 3] [--output-json FILE]

Each round runs the work in turn: offline, over HTTP in one piece, both again as streams; every second round in the
opposite order. Each side has a process of its own, so that none is favoured by what the process did before; requests
come over real sockets, all at once. Time between tokens is between outputs of one request that hold new tokens: offline
in the thread that runs the steps, over HTTP where the client reads them.

The report gives wall-clock time and processor time. The client runs on the server's cores, so its processor time counts
as the server's. On a machine shared with others, wall-clock time also tells how busy those were.

Then short requests are sent while the server prefills a long prompt. A short request is admitted in the step after the
one that runs, and its prefill shares that step, so it waits for at most two steps of max_num_batched_tokens tokens, as
long as the short requests together do not fill the steps. The report compares the longest wait for a first token with
the longest such wait without a long prompt, and with two steps of the long prompt alone.

`vllm bench serve`, where vLLM is installed, is a second client that shares no code with this one:

    nanovllm serve --model DIR --port 8000
    vllm bench serve --backend openai --model NAME --tokenizer DIR --base-url http://127.0.0.1:8000 \
        --dataset-name random --random-input-len 64 --random-output-len 64 --num-prompts 64 --ignore-eos
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.options import Parser, add_device_option, add_json_option, positive
from benchmarks.report import machine_facts
from nanovllm import LLM, SamplingParams
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.outputs import RequestOutputKind

START_SECONDS = 300.0
SHORT_PER_STEP = 4  # short requests during a step of the long prefill, so that they take a part of it and not all


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the work.

    processor: processor seconds of all threads that took part. gaps: seconds between outputs of the same request,
    without the time to the first.
    """

    tokens: int
    seconds: float
    processor: float
    gaps: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[-1]


def run(args: argparse.Namespace) -> int:
    spec = load_decoder_spec(args.model)
    prompts = [_prompt(args.prompt_len, spec.vocab_size, i) for i in range(args.requests)]
    long_prompt = _prompt(args.long_prompt_len, spec.vocab_size, -1)
    blocks = args.requests * -(-(args.prompt_len + args.output_len) // args.block_size) + 8
    blocks += -(-args.long_prompt_len // args.block_size)
    engine = {
        "device": args.device or "cpu",
        "kvcache_block_size": args.block_size,
        "num_gpu_blocks": blocks,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "enable_prefix_caching": False,
        "load_format": args.load_format,
    }
    with _offline(args.model, engine) as offline, _server(args.model, engine) as server:

        def over_http(stream: bool) -> Run:
            return asyncio.run(_over_http(server, prompts, args.output_len, stream=stream))

        sides: dict[str, Callable[[], Run]] = {
            "offline": lambda: offline(prompts, args.output_len, stream=False),
            "http": lambda: over_http(False),
            "offline streams": lambda: offline(prompts, args.output_len, stream=True),
            "http streams": lambda: over_http(True),
        }
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for number in range(args.repeats + 1):
            for name in sides if number % 2 else reversed(sides):
                run = sides[name]()
                if number:  # the first round warms up
                    runs[name].append(run)
        waits = asyncio.run(_during_a_long_prefill(server.port, prompts[0], long_prompt, args.max_num_batched_tokens))
    result = {
        "benchmark": "serving",
        "arguments": {**vars(args), "model": Path(args.model).name},
        "facts": machine_facts(engine["device"]),
        "tokens_per_second": {name: [run.rate for run in each] for name, each in runs.items()},
        "p99_between_tokens": {name: [run.p99 for run in each if run.gaps] for name, each in runs.items()},
        "processor_ms_per_token": {
            name: [run.processor / run.tokens * 1e3 for run in each] for name, each in runs.items()
        },
        "during_a_long_prefill": asdict(waits),
    }
    _print(result)
    if args.output_json:
        args.output_json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return 0


def _print(result: dict[str, Any]) -> None:
    facts = result["facts"]
    print(f"{result['arguments']['model']}, {facts['cpu']}, {facts['threads']} threads; {facts['date']}")
    rates = {name: statistics.median(values) for name, values in result["tokens_per_second"].items()}
    p99 = {name: statistics.median(values) for name, values in result["p99_between_tokens"].items() if values}
    for name, rate in rates.items():
        gap = f", p99 between tokens {p99[name] * 1e3:.1f} ms" if name in p99 else ""
        print(f"{name:<16}{rate:10,.1f} tokens/s{gap}")
    processor = {name: statistics.median(values) for name, values in result["processor_ms_per_token"].items()}
    print(f"HTTP: {rates['http'] / rates['offline']:.1%} of LLM.generate's throughput, ", end="")
    print(f"{processor['http'] / processor['offline']:.1%} of its processor time")
    print(f"streams: {rates['http streams'] / rates['offline streams']:.1%} of LLM.stream's, ", end="")
    print(f"{processor['http streams'] / processor['offline streams']:.1%} of its processor time", end="")
    if {"http streams", "offline streams"} <= p99.keys():  # streams of several tokens that came one by one
        print(f", p99 between tokens {p99['http streams'] / p99['offline streams']:.2f} times LLM.stream's", end="")
    print()
    waits = Waits(**result["during_a_long_prefill"])
    print(
        f"during a prefill of {waits.prompt_tokens:,} tokens ({waits.prefill:.1f} s), {len(waits.short)} short "
        f"requests waited {statistics.median(waits.short):.2f} s for a first token, at most {max(waits.short):.2f} s; "
        f"alone {waits.alone:.2f} s; two steps take {2 * waits.step:.2f} s"
    )


# ---- offline


@contextmanager
def _offline(model: str, engine: dict[str, Any]) -> Iterator[Callable[..., Run]]:
    """An LLM in a process of its own, as a function that runs the work there."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_offline_process, args=(there, model, engine), daemon=True)
    process.start()
    there.close()  # if the process dies, `here.recv` raises instead of waiting

    def run(prompts: list[list[int]], output_len: int, *, stream: bool) -> Run:
        here.send((_stream if stream else _generate, prompts, output_len))
        return here.recv()

    here.recv()
    try:
        yield run
    finally:
        here.send(None)
        process.join(START_SECONDS)


def _offline_process(pipe: Connection, model: str, engine: dict[str, Any]) -> None:
    with LLM(model, **engine) as llm:
        pipe.send(None)
        for run, *work in iter(pipe.recv, None):
            pipe.send(run(llm, *work))


def _generate(llm: LLM, prompts: list[list[int]], output_len: int) -> Run:
    start = time.perf_counter()
    processor = time.process_time()
    outputs = llm.generate(prompts, _params(output_len), use_tqdm=False)
    seconds = time.perf_counter() - start
    processor = time.process_time() - processor
    return Run(sum(len(output.outputs[0].token_ids) for output in outputs), seconds, processor)


def _stream(llm: LLM, prompts: list[list[int]], output_len: int) -> Run:
    start = time.perf_counter()
    processor = time.process_time()
    tokens = 0
    last = dict[str, float]()
    gaps = []
    for output in llm.stream(prompts, _params(output_len, output_kind=RequestOutputKind.DELTA)):
        now = time.perf_counter()
        new = sum(len(completion.token_ids) for completion in output.outputs)
        if new and output.request_id in last:
            gaps.append(now - last[output.request_id])
        if new:
            tokens += new
            last[output.request_id] = now
    return Run(tokens, time.perf_counter() - start, time.process_time() - processor, tuple(gaps))


def _params(output_len: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, **others)


def _prompt(length: int, vocab_size: int, number: int) -> list[int]:
    chosen = random.Random(number)
    return [chosen.randrange(vocab_size) for _ in range(length)]


# ---- over HTTP, with a client that costs little, as it runs on the server's cores


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    port: int

    def processor_seconds(self) -> float:
        """Of all its threads since it started (proc_pid_stat(5), fields 14 and 15)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(model: str, engine: dict[str, Any]) -> Iterator[Server]:
    """`nanovllm serve` on a free port."""
    flags = [
        f"--no-{name.replace('_', '-')}" if value is False else f"--{name.replace('_', '-')}={value}"
        for name, value in engine.items()
    ]
    command = [sys.executable, "-m", "nanovllm", "serve", "--model", model, "--port", "0", "--no-ui", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "is served at" in line:
                yield Server(process.pid, int(line.split("is served at ")[1].split(",")[0].rpartition(":")[2]))
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(START_SECONDS)


async def _over_http(server: Server, prompts: list[list[int]], output_len: int, *, stream: bool) -> Run:
    start = time.perf_counter()
    processor = time.process_time() + server.processor_seconds()
    done = await asyncio.gather(*(_request(server.port, prompt, output_len, stream) for prompt in prompts))
    seconds = time.perf_counter() - start
    processor = time.process_time() + server.processor_seconds() - processor
    gaps = tuple(later - earlier for times in done for earlier, later in itertools.pairwise(times))
    return Run(len(prompts) * output_len, seconds, processor, gaps)


async def _request(port: int, prompt: list[int], output_len: int, stream: bool) -> list[float]:
    """Send one request. Returns when each part with tokens came, if it streams. Raises for an incomplete one."""
    body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0.0, "ignore_eos": True, "stream": stream}
    data = json.dumps(body | {"return_token_ids": True}).encode()
    header = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(f"{header}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    times = []
    tokens = 0
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode())
    while line := await reader.readline():
        found = line.rpartition(b'"token_ids":[')[2].partition(b"]")[0] if b'"token_ids":[' in line else b""
        if found:
            tokens += found.count(b",") + 1
            times.append(time.perf_counter())
    writer.close()
    if tokens != output_len:
        raise RuntimeError(f"{tokens} tokens came instead of {output_len}")
    return times if stream else []


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds to the first token of short requests, while a long prompt is prefilled (`short`) and before (`alone`)."""

    prompt_tokens: int
    prefill: float
    step: float  # of the long prefill alone, on average
    alone: float
    short: list[float]


async def _during_a_long_prefill(port: int, short: list[int], long: list[int], chunk: int) -> Waits:
    alone = max([await _first_token(port, short) for _ in range(3)])
    step = await _first_token(port, long) / -(-len(long) // chunk)
    prefill = asyncio.ensure_future(_first_token(port, long))
    await asyncio.sleep(step / SHORT_PER_STEP)
    waits = []
    while not prefill.done():
        waits.append(asyncio.ensure_future(_first_token(port, short)))
        await asyncio.wait((prefill,), timeout=step / SHORT_PER_STEP)
    done = await asyncio.gather(*waits)
    return Waits(len(long), await prefill, step, alone, done)


async def _first_token(port: int, prompt: list[int]) -> float:
    start = time.perf_counter()
    await _request(port, prompt, 1, True)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.serving", description="What HTTP costs.")
    parser.add_argument("--model", required=True, help="a checkpoint in Hugging Face format")
    for name, default, text in (
        ("requests", 64, "requests at once"),
        ("prompt-len", 64, "tokens of a short prompt"),
        ("output-len", 64, "tokens of an answer"),
        ("long-prompt-len", 4096, "tokens of the long prompt"),
        ("block-size", 64, "tokens in a KV block"),
        ("max-num-batched-tokens", 1024, "tokens in a step"),
        ("repeats", 3, "rounds that count"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add_device_option(parser)
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
