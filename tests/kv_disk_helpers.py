"""Helpers for tests of KV blocks on disk: a prompt, engines that write and read it, and a disk that does not answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from engines import offloaded, random_prompt

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

VOCAB = 199
CHECKPOINT = {"seed": 3, "max_positions": 2048}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3)
PROMPT = random_prompt(850, VOCAB, 1)
RESIDENT = {"kvcache_block_size": 128, "num_gpu_blocks": 30}
WAYS: list[dict[str, Any]] = [
    RESIDENT,
    {"kvcache_block_size": 384, "num_gpu_blocks": 12, "max_num_batched_tokens": 100},
    {"num_gpu_blocks": 8},
    offloaded(128, 4, 20, max_num_batched_tokens=200),
    offloaded(512, 3, 6),
]


def engine(model: Path, directory: Path | None, **arguments: Any) -> LLM:
    given = {"dtype": "float32", "device": "cpu", **RESIDENT, **arguments}
    return LLM(model, kv_cache_dir=directory, **given)


def ask(llm: LLM, prompt: Any = None, params: SamplingParams = PARAMS) -> RequestOutput:
    return llm.generate([PROMPT if prompt is None else prompt], params, use_tqdm=False)[0]


def run(model: Path, directory: Path | None, prompt: Any = None, **arguments: Any) -> RequestOutput:
    """The answer of an engine of its own."""
    with engine(model, directory, **arguments) as llm:
        return ask(llm, prompt)


def step_until_loading(llm: LLM) -> None:
    """Its first step may still look for what is stored."""
    while llm.metrics().requests.loading == 0:
        assert llm.engine.step() == []


def finished_next(llm: LLM) -> RequestOutput:
    """The answer of the one request. Steps have no outputs while its blocks are looked for and read."""
    while True:
        for output in llm.engine.step():
            if output.finished:
                return output


def numbers(output: RequestOutput) -> Any:
    completion = output.outputs[0]
    rows = [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs or ()]
    return completion.token_ids, rows


def stored_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"))


def written_fixture() -> Any:
    """A fixture of a module: a directory with the prompt of its `model`, and the answer."""

    @pytest.fixture(scope="module")
    def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("written")
        return directory, numbers(run(model, directory))

    return written


@contextmanager
def unanswered(path: Path) -> Iterator[None]:
    """Who opens the file reads it when the context ends: it is a pipe meanwhile."""
    aside = path.with_name("aside")
    path.rename(aside)
    os.mkfifo(path)
    try:
        yield
    finally:
        with suppress(OSError):  # nobody reads it, or no more
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(pipe, True)
            with open(pipe, "wb") as file:
                file.write(aside.read_bytes())
        aside.rename(path)
