"""`nanovllm serve` as a process: load, memory, signals. Slow.

NANOVLLM_LOAD_REQUESTS is the number of requests that memory is watched over, NANOVLLM_LOAD_LONG the length of the long
prompts in tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from cli_helpers import make_model
from rank_processes import child_pids, is_running, rank_pids
from waiting import PATIENCE, eventually

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.slow

RESIDENT = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 400}
OFFLOADED = {
    "device": "cpu",
    "enable_cpu_offload": True,
    "kvcache_block_size": 256,
    "num_gpu_blocks": 24,
    "num_cpu_blocks": 400,
    "max_num_batched_tokens": 2048,
}
ROOT = str(Path(__file__).parent.parent)
LONG = int(os.environ.get("NANOVLLM_LOAD_LONG", "30000"))
DOCUMENTS = 2
BODY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}


@contextmanager
def served(model: str, engine: dict[str, Any], *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port."""
    given = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in engine.items()]
    command = [sys.executable, "-m", "nanovllm", "serve", "--model", model, "--port", "0", *given, *flags]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True, env=environment)
        try:
            assert eventually(lambda: process.poll() is not None or "is served at" in logged(log), 300)
            yield process, int(logged(log).split("is served at ")[1].split(",")[0].rpartition(":")[2])
        except BaseException:
            print(process.poll(), logged(log)[-5000:])
            raise
        finally:
            process.kill()
            process.wait()


def logged(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("long"), max_positions=32768)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def health(port: int) -> int:
    return httpx.get(f"{url(port)}/health", timeout=PATIENCE).status_code


def metric(port: int, name: str) -> float:
    text = httpx.get(f"{url(port)}/metrics", timeout=PATIENCE).text
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([\d.e+]+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def is_idle(port: int, num_blocks: int) -> bool:
    """No request and no used block: all are free or cached."""
    used = metric(port, "nanovllm:kv_blocks_used")
    running = metric(port, "vllm:num_requests_running")
    held = metric(port, "nanovllm:kv_blocks_free") + metric(port, "nanovllm:kv_blocks_cached")
    return used == 0 and running == 0 and metric(port, "vllm:num_requests_waiting") == 0 and held == num_blocks


def counts(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Open files and threads."""
    folder = Path(f"/proc/{process.pid}")
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))


def resident_bytes(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tokens(length: int, number: int) -> list[int]:
    chosen = random.Random(number)
    return [chosen.randrange(256) for _ in range(length)]


# ---- load


async def stream(client: httpx.AsyncClient, prompt: list[int], *, drop: bool, slow: bool) -> tuple[str, list[float]]:
    """Text and log-probabilities of a streamed completion; nothing if it is dropped in the middle."""
    body = {**BODY, "prompt": prompt, "stream": True}
    lines = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        if slow:
            pieces = response.aiter_raw(1)
            for _ in range(10):
                await anext(pieces)
                await asyncio.sleep(1)
            return "", []
        async for line in response.aiter_lines():
            lines.append(line)
            if drop and line:
                return "", []
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for part in parts for choice in part["choices"]]
    return (
        "".join(choice["text"] for choice in choices),
        [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
    )


def test_two_hundred_connections_under_offload(long_model: str) -> None:
    """A fifth is dropped in the middle, some read a byte a second; all others are answered as offline, to the bit."""
    longs = [tokens(LONG, i) for i in range(DOCUMENTS)]
    prompts = [longs[i % DOCUMENTS] if i % 40 == 0 else tokens(10, 100 + i) for i in range(200)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(long_model, **OFFLOADED) as llm:  # type: ignore[arg-type]
        offline = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        num_blocks = llm.engine.scheduler.block_manager.pool.num_blocks

    async def load(port: int) -> list[tuple[str, list[float]]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url(port), timeout=1200, limits=limits) as client:
            jobs = (stream(client, prompt, drop=i % 5 == 4, slow=i % 50 == 3) for i, prompt in enumerate(prompts))
            return await asyncio.gather(*jobs)

    with served(long_model, OFFLOADED) as (process, port):
        warm_up = {**BODY, "prompt": tokens(24 * 256 + 500, 1000)}  # more than the device holds: every stream is used
        assert httpx.post(f"{url(port)}/v1/completions", json=warm_up, timeout=600).status_code == 200
        before = counts(process)
        answers = asyncio.run(load(port))
        wrong = []
        for i, ((text, logprobs), expected) in enumerate(zip(answers, offline, strict=True)):
            exact = [at[token].logprob for at, token in zip(expected.logprobs or (), expected.token_ids, strict=True)]
            if i % 5 != 4 and i % 50 != 3 and (text, logprobs) != (expected.text, exact):
                wrong.append(i)
        assert not wrong
        assert eventually(lambda: is_idle(port, num_blocks))
        files, threads = before
        assert eventually(lambda: counts(process)[0] <= files and counts(process)[1] <= threads)


def test_memory_is_flat_over_many_requests(model: str) -> None:
    total = int(os.environ.get("NANOVLLM_LOAD_REQUESTS", "2000"))

    async def load(port: int, first: int, count: int) -> None:
        async with httpx.AsyncClient(base_url=url(port), timeout=600) as client:
            slots = asyncio.Semaphore(32)

            async def one(i: int) -> None:
                async with slots:
                    body = {"prompt": tokens(20 + i % 300, i), "max_tokens": 4, "logprobs": 5, "stream": i % 2 == 0}
                    (await client.post("/v1/completions", json=body)).raise_for_status()

            await asyncio.gather(*(one(first + i) for i in range(count)))

    with served(model, RESIDENT) as (process, port):
        asyncio.run(load(port, 0, total // 4))
        settled = resident_bytes(process)
        asyncio.run(load(port, total // 4, total - total // 4))
        grown = resident_bytes(process) - settled
        print(f"{total} requests; {settled / 2**20:.0f} MiB after a quarter, {grown / 2**20:+.1f} MiB at the end")
        assert grown < 24 << 20
        assert eventually(lambda: is_idle(port, int(RESIDENT["num_gpu_blocks"])))


# ---- signals


def test_a_signal_lets_requests_end_and_exits_0(model: str) -> None:
    with served(model, RESIDENT, "--shutdown-timeout", "300") as (process, port):
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url(port)}/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(("state", "killed"), [("busy", 1), ("idle", 0)])
def test_a_killed_rank_ends_the_server(state: str, killed: int, long_model: str) -> None:
    """Clients get an error, before the ranks' timeout, and nothing is left of the server."""
    two_ranks = {**RESIDENT, "num_gpu_blocks": 2000, "tensor_parallel_size": 2, "distributed_timeout_seconds": 3600}
    with served(long_model, two_ranks) as (process, port):
        path = f"{url(port)}/v1/completions"
        with LLM(long_model, **RESIDENT) as llm:  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            expected = llm.generate("hello", params, use_tqdm=False)[0].outputs[0].text
        assert httpx.post(path, json={**BODY, "prompt": "hello"}, timeout=60).json()["choices"][0]["text"] == expected
        ranks = rank_pids(process.pid)
        others = child_pids(process.pid)
        assert len(ranks) == 2
        body = {"prompt": "a", "max_tokens": 30000, "ignore_eos": True, "stream": True}
        if state == "busy":
            with httpx.stream("POST", path, json=body, timeout=120) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(ranks[killed], signal.SIGKILL)
                rest = [line for line in lines if line]
            assert any('"error"' in line for line in rest), rest[-3:]
        else:
            os.kill(ranks[killed], signal.SIGKILL)
        assert process.wait(PATIENCE) == 1
        with pytest.raises(httpx.ConnectError):
            health(port)
        assert eventually(lambda: not any(map(is_running, others)))
