"""Fuzz of what users send: sampling parameters with prompts and messages, JSON lines, and flags.

Whatever it is, it is served right or refused in one sentence, and a known question is answered right after it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from bounded import FuzzTarget
from hypothesis import strategies as st
from request_checks import (
    QUESTION,
    answer,
    check_engine_goes_on,
    check_message,
    check_output,
    llm,
    model_dir,
    one_engine_for_all,
    strict_json,
)
from request_values import PARAMETERS, anything, few_params, messages, parameter, params, prompts, texts

from nanovllm import SamplingParams
from nanovllm.apps.cli.arguments import ENGINE, SAMPLING, flag_name
from nanovllm.apps.cli.main import main
from nanovllm.config import EngineConfig, engine_config
from nanovllm.errors import ConfigError, RequestError

# ---- through the API


def check_request(prompt: Any, fields: dict[str, Any], is_chat: bool) -> str:
    try:
        sampling = SamplingParams(**fields)
        run = llm().chat if is_chat else llm().generate
        outputs = run(prompt, sampling, use_tqdm=False)
    except RequestError as error:
        assert type(error) is RequestError
        check_message(str(error))
        word = "refused"
    else:
        for output in outputs:
            check_output(output, sampling)
        word = "failed" if any(output.error for output in outputs) else "served"
    check_engine_goes_on()
    return word


REQUESTS = FuzzTarget(
    "requests", check_request, prompt=prompts, fields=st.one_of(params, few_params), is_chat=st.just(False)
)
PARAMS = FuzzTarget(
    "sampling-params", check_request, prompt=st.just("a prompt"), fields=few_params, is_chat=st.just(False)
)
CHATS = FuzzTarget("chats", check_request, prompt=messages, fields=st.just({"max_tokens": 2}), is_chat=st.just(True))


# ---- through the command line


def run_command(words: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the real command line."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), one_engine_for_all():
        try:
            status = main(words)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return status, out.getvalue(), err.getvalue()


def check_lines(lines: list[bytes]) -> str:
    """JSON lines, and the known question behind them: each line has its result or its error."""
    lines = [line.replace(b"\n", b" ").replace(b"\r", b" ") for line in lines]
    expected = answer()
    question = {"prompt": QUESTION, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "id": "known"}
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        Path(file.name).write_bytes(b"\n".join([*lines, json.dumps(question).encode()]))
        status, out, err = run_command(["generate", "--model", model_dir(), "--json", "--jsonl", file.name])
    results = [strict_json(line) for line in out.split("\n") if line]  # JSON strings may hold other line ends
    prompts = b"\n".join(lines).removeprefix(codecs.BOM_UTF8).split(b"\n")  # the mark is the file's, not a line's
    assert len(results) == 1 + sum(bool(line.strip()) for line in prompts)
    assert results[-1]["id"] == "known" and results[-1]["outputs"][0]["text"] == expected
    failed = [result["error"] for result in results if "error" in result]
    for sentence in failed:
        check_message(sentence)
    assert status == bool(failed) and "Traceback" not in err
    check_engine_goes_on()
    return "some failed" if failed else "all served"


def is_argument(word: str) -> bool:
    """Whether a process can be given the word: it is made of bytes, and has no end before its end."""
    return "\0" not in word and word == os.fsdecode(word.encode("utf-8", "replace"))


def check_flags(command: str, words: list[str]) -> str:
    usable = [word for word in words if is_argument(word) and word.partition("=")[0] not in ("--trace", "--output")]
    arguments = [command, "--model", model_dir(), *usable]
    if command == "generate":
        arguments += ["--max-tokens", "3", "a prompt"]
    status, _, err = run_command(arguments)
    assert status in (0, 1, 2), status
    for line in err.splitlines():
        check_message(line)
    assert bool(err) >= bool(status), "a failure says why"
    check_engine_goes_on()
    return f"status {status}"


def check_engine_arguments(arguments: dict[str, Any]) -> str:
    try:
        engine_config(model_dir(), arguments)
    except ConfigError as error:
        check_message(str(error))
        return "refused"
    return "accepted"


def dumped(value: Any) -> bytes:
    """As JSON, which can hold integers of any length."""
    try:
        return json.dumps(value).encode()
    except ValueError:
        return b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}"


JSON_OBJECTS = st.builds(
    lambda prompt, fields, extra: {**prompt, **fields, **extra},
    st.one_of(
        st.just({"prompt": "a prompt"}),
        st.fixed_dictionaries({}, optional={"prompt": texts, "prompt_token_ids": anything, "messages": messages}),
    ),
    few_params,
    st.fixed_dictionaries({}, optional={"id": anything, "cache_salt": anything, "x": anything}),
)
LINES = FuzzTarget(
    "json-lines",
    check_lines,
    lines=st.lists(
        st.one_of(
            JSON_OBJECTS.map(dumped),
            JSON_OBJECTS.map(dumped).flatmap(
                lambda line: st.tuples(st.integers(0, len(line)), st.binary(max_size=3)).map(
                    lambda change: line[: change[0]] + change[1] + line[change[0] + len(change[1]) :]
                )
            ),
            anything.map(dumped),
            st.binary(max_size=20),
        ),
        max_size=6,
    ),
)
ENGINE_FIELDS = sorted(set(EngineConfig.__dataclass_fields__) - {"model"})
FLAG_NAMES = [flag_name(ENGINE, name) for name in ENGINE_FIELDS]
FLAG_NAMES += [flag_name(SAMPLING, name) for name in PARAMETERS]
FLAG_WORDS = st.one_of(
    st.builds(
        lambda name, value: [name, value],
        st.sampled_from(FLAG_NAMES),
        st.one_of(texts, st.integers().map(str), st.floats().map(str), st.integers(0, 64).map(str)),
    ),
    st.sampled_from(["--json", "--stream", "--verbos", "--no-cpu-attention", "--enforce-eager"]).map(lambda x: [x]),
    st.builds(lambda token, bias: ["--logit-bias", json.dumps({token: bias})], st.integers(), st.floats()),
)
FLAGS = FuzzTarget(
    "flags",
    check_flags,
    command=st.just("generate"),
    words=st.lists(FLAG_WORDS, max_size=3).map(lambda groups: [word for group in groups for word in group]),
)
ENGINE_ARGUMENTS = FuzzTarget(
    "engine-arguments",
    check_engine_arguments,
    arguments=st.lists(st.sampled_from([*ENGINE_FIELDS, "x"]), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.one_of(anything, parameter("n")) for name in names})
    ),
)

TARGETS = {"requests": (REQUESTS, 30), "params": (PARAMS, 30), "chats": (CHATS, 30), "lines": (LINES, 12)}
TARGETS |= {"flags": (FLAGS, 20), "engine arguments": (ENGINE_ARGUMENTS, 100)}


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_examples(name: str) -> None:
    target, count = TARGETS[name]
    target.replay()
    target.run_examples(count)
