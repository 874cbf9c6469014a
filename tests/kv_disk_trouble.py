"""Trouble on purpose for KV blocks on disk: processes killed at random moments, damaged files, a full file system.

    python tests/kv_disk_trouble.py kills|mutations|full MODEL DIRECTORY ROUNDS SEED

After each round the directory is verified, and a new engine's answers are those of one without a directory. Engines run
in forks of a process that has only imported what they need, so that starting one takes little. Prints one line in the
end, and ends with status 1 at the first wrong answer.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.features.kv_disk import kept_in

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
ENGINES: list[dict[str, Any]] = [
    {"kvcache_block_size": 128, "num_gpu_blocks": 40},
    {"kvcache_block_size": 256, "num_gpu_blocks": 20, "max_num_batched_tokens": 150},
    {"kvcache_block_size": 128, "num_gpu_blocks": 6, "num_cpu_blocks": 40, "enable_cpu_offload": True},
]
NUM_PROMPTS = 12
LONGEST_LIFE = 1.5  # seconds until a process is killed


def prompts() -> list[list[int]]:
    """Some begin alike."""
    source = random.Random(7)
    shared = [source.randrange(199) for _ in range(520)]
    return [
        shared[: 260 * (index % 3)] + [source.randrange(199) for _ in range(300 + 40 * index)]
        for index in range(NUM_PROMPTS)
    ]


def engine(model: str, directory: Path | None, which: int) -> LLM:
    return LLM(model, dtype="float32", device="cpu", kv_cache_dir=directory, **ENGINES[which % len(ENGINES)])


def answers(llm: LLM, asked: list[list[int]]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], PARAMS, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    completions = [output.outputs[0] for output in outputs]
    return [
        (
            completion.token_ids,
            [sorted((token, row[token].logprob) for token in row) for row in completion.logprobs or ()],
        )
        for completion in completions
    ]


def forked(work: Callable[[], None]) -> int:
    """The process id of a fork that does the work and ends with status 0, or 1 if it raises."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def check(work: Callable[[], None]) -> None:
    if os.waitpid(forked(work), 0)[1]:
        raise SystemExit("a check has failed")


def expected_of(model: str, keep: Path) -> list[Any]:
    """The answers of an engine without a directory, computed in a fork."""

    def write() -> None:
        with engine(model, None, 0) as llm:
            keep.write_text(repr(answers(llm, prompts())))

    check(write)
    answered: list[Any] = eval(keep.read_text())
    return answered


def mixed_run(model: str, directory: Path, which: int, seed: int) -> None:
    """Ask for prompts in random groups, for ever."""
    source = random.Random(seed)
    every = prompts()
    with engine(model, directory, which) as llm:
        while True:
            answers(llm, source.sample(every, source.randrange(1, 4)))
            if source.random() < 0.2:
                llm.reset_prefix_cache()


def check_answers(model: str, directory: Path, which: int, chosen: list[int], expected: list[Any]) -> None:
    every = prompts()
    with engine(model, directory, which) as llm:
        answered = answers(llm, [every[index] for index in chosen])
        assert answered == [expected[index] for index in chosen], "an answer is wrong"
        read = llm.metrics().prefix_cache.hit_tokens_on_disk
    with (directory.parent / "read").open("a") as file:
        file.write(f"{read}\n")


def kills(model: str, directory: Path, rounds: int, seed: int, expected: list[Any]) -> str:
    source = random.Random(seed)
    for number in range(rounds):
        if source.random() < 0.1:
            shutil.rmtree(directory, ignore_errors=True)
        pids = [
            forked(partial(mixed_run, model, directory, which, seed + number))
            for which in source.sample(range(len(ENGINES)), 1 + number % 2)
        ]
        for pid in pids:
            time.sleep(source.random() * LONGEST_LIFE / len(pids))
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it ended before it was killed"
        if directory.is_dir():
            half_written = [kept.path for kept in kept_in(directory, verify=True) if kept.damaged]
            assert not half_written
        chosen = source.sample(range(NUM_PROMPTS), 4)
        check(partial(check_answers, model, directory, number, chosen, expected))
    return f"{rounds} rounds"


def mutations(model: str, directory: Path, rounds: int, seed: int, expected: list[Any]) -> str:
    def fill() -> None:
        for _ in range(2):
            with engine(model, directory, 0) as llm:
                answers(llm, prompts())

    check(fill)
    source = random.Random(seed)

    def mutate_and_ask(first: int) -> None:
        for number in range(first, min(rounds, first + 25)):
            other = directory.parent / "mutated"
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(directory, other)
            for path in source.sample(sorted(other.glob("*/*.kv")), 1):
                path.write_bytes(mutated(bytearray(path.read_bytes()), source))
            kept_in(other, verify=True)
            chosen = source.sample(range(NUM_PROMPTS), 3)
            check_answers(model, other, number, chosen, expected)

    for first in range(0, rounds, 25):
        source.seed(seed + first)
        check(partial(mutate_and_ask, first))
    return f"{rounds} mutated files"


def mutated(content: bytearray, source: random.Random) -> bytes:
    """A file with one mistake of a random kind."""
    at, other = sorted(source.randrange(len(content)) for _ in range(2))
    kind = source.randrange(8)
    if kind == 0:
        content[at] ^= 1 << source.randrange(8)
    elif kind == 1:
        del content[at:]
    elif kind == 2:
        content += content[at:other]
    elif kind == 3:
        content[at:other] = bytes(other - at)
    elif kind == 4:
        content[at:other] = source.randbytes(other - at)
    elif kind == 5:
        del content[at:other]
    elif kind == 6:
        content[at:at] = source.randbytes(source.randrange(1, 200))
    else:
        content = content[other:] + content[:other]
    return bytes(content)


def full(model: str, directory: Path, rounds: int, seed: int, expected: list[Any]) -> str:
    """On a file system that is smaller than what is to be stored. A file takes more of its room in each round."""
    directory.mkdir(exist_ok=True)
    for number in range(rounds):
        free = shutil.disk_usage(directory).free
        ballast = directory / f"ballast-{number}"
        ballast.write_bytes(bytes(min(free, free // 2 if number + 1 < rounds else free)))
        check(partial(check_answers, model, directory, number, list(range(NUM_PROMPTS)), expected))
        assert not any(kept.damaged for kept in kept_in(directory, verify=True))
    return f"{rounds} rounds, {shutil.disk_usage(directory).free} bytes free in the end"


def main() -> None:
    what, model, folder, rounds, seed = sys.argv[1:]
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    expected = expected_of(model, root / "expected")
    try:
        work = {"kills": kills, "mutations": mutations, "full": full}[what]
        said = work(model, root / "kv", int(rounds), int(seed), expected)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    read = [int(line) for line in (root / "read").read_text().split()]
    hits = sum(tokens > 0 for tokens in read)
    print(f"{what}: {said}; all answers right, {hits} of {len(read)} engines read from disk, {sum(read)} tokens")


if __name__ == "__main__":
    main()
