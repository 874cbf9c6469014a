"""One small engine for all fuzz of requests, and what must hold of it after each of them."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from block_helpers import check_blocks
from checkpoints import make_checkpoint
from cli_helpers import TEMPLATE
from tokenizer_files import write_byte_level

from nanovllm import LLM, SamplingParams
from nanovllm.config import engine_config
from nanovllm.outputs import RequestOutput

VOCAB = 300
MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 4
LONGEST_MESSAGE = 2200
QUESTION = "what is known"


@functools.cache
def model_dir() -> str:
    """A tiny checkpoint with a tokenizer; it stays as long as the process."""
    folder = tempfile.TemporaryDirectory()
    make_checkpoint(folder.name, vocab=VOCAB, max_positions=MAX_MODEL_LEN, layers=1, eos_token_id=[7])
    write_byte_level(Path(folder.name), chat_template=TEMPLATE)
    _kept().append(folder)
    return folder.name


@functools.cache
def _kept() -> list[Any]:
    return []


@functools.cache
def llm() -> LLM:
    return LLM(model_dir(), device="cpu", kvcache_block_size=16, num_gpu_blocks=12, max_num_seqs=MAX_NUM_SEQS)


@functools.cache
def answer() -> str:
    return ask()


def ask() -> str:
    """The answer to the known question."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return llm().generate(QUESTION, params, use_tqdm=False)[0].outputs[0].text


def check_engine_goes_on() -> None:
    """Nothing is left of the requests before, and the known question is answered right."""
    engine = llm().engine
    assert not engine.has_unfinished_requests() and not engine._requests
    check_blocks(engine.scheduler.block_manager)
    assert engine.scheduler.block_manager.pool.num_used == 0
    assert ask() == answer()


def check_message(text: str) -> None:
    """One sentence in one line that can be written."""
    assert text and "\n" not in text and len(text) <= LONGEST_MESSAGE, text
    assert "Traceback" not in text and "unexpected error" not in text, text
    text.encode()


def _no_json(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def strict_json(line: str) -> Any:
    return json.loads(line, parse_constant=_no_json)


def check_output(output: RequestOutput, params: SamplingParams) -> None:
    """What holds of every result, whatever was asked for."""
    assert output.finished and len(output.outputs) == params.n
    for completion in output.outputs:
        tokens = completion.token_ids
        assert all(0 <= token < VOCAB for token in tokens)
        assert len(tokens) <= (params.max_tokens or MAX_MODEL_LEN)
        if completion.finish_reason == "error":
            assert output.error is not None
            check_message(output.error)
            continue
        assert completion.finish_reason in ("stop", "length") and output.error is None
        assert tokens or params.max_tokens == 0
        assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
        banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
        assert not banned.intersection(tokens), "a banned token"
        is_stopped = completion.finish_reason == "stop"
        may_be_short = params.use_beam_search or params.min_tokens == 0 or params.structured_outputs is not None
        assert not is_stopped or may_be_short or len(tokens) > params.min_tokens
        values = [] if completion.cumulative_logprob is None else [completion.cumulative_logprob]
        values += [entry.logprob for row in completion.logprobs or [] for entry in row.values()]
        values += [entry.logprob for row in output.prompt_logprobs or [] if row for entry in row.values()]
        assert all(map(math.isfinite, values)), "log-probabilities that are no JSON"
        completion.text.encode()


@contextmanager
def one_engine_for_all() -> Iterator[None]:
    """The command line makes no engine of its own: arguments are checked as LLM does, then the one engine is used."""

    class Shared:
        def __init__(self, model: str, **arguments: Any) -> None:
            engine_config(model, arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(llm(), name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return

    llm()  # a real one
    with mock.patch("nanovllm.llm.LLM", Shared):
        yield
