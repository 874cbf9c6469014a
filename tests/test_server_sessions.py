"""Sessions of agents over HTTP: no turn computes again what an earlier one has computed.

Nothing that a client sends names a conversation. What the model writes is scripted; its layers are those of the family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cli_helpers import make_model
from fast import fast_only
from scripted_model import Script, write_by
from server_helpers import CHAT, COMPLETIONS, ok
from tokenizer_files import add_special

from nanovllm.apps.server.async_llm import AsyncLLM
from nanovllm.apps.tool_calls.harmony import MARKS
from nanovllm.text.tokenizer import HuggingFaceTokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
Message = dict[str, Any]
KNOWN = 256  # old tokens computed again at most, after a place where a prompt or an answer ended or prompts parted
ANYWHERE = 2048  # after any other place, in windows and recurrent layers
BLOCK = 256
NEAR = 16  # tokens: the start of an answer, which templates write at the end of a prompt, and what may follow it
RESULT = 5000  # characters of a tool's long result
READ: Message = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "where"}}},
    },
}


class Style(NamedTuple):
    """How a family's model writes, as formats of `thought`, `said` and `path`."""

    checkpoint: dict[str, Any]
    call: str
    final: str
    call_end: str
    final_end: str
    marks: tuple[str, ...] = ()  # special tokens besides
    words: tuple[str, ...] = ()  # tokens that text shows
    bound: int = KNOWN
    has_tools: bool = True  # in its template; else calls and results are text


THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
STYLES = {
    "smollm2": Style(
        {"family": "llama"},
        "{said}\n[read {path}]",
        "{said}",
        "<|im_end|>",
        "<|im_end|>",
        ("<|im_start|>",),
        has_tools=False,
    ),
    "gemma3": Style(
        {"family": "gemma3", "sliding_window": 512},
        "{said}\n[read {path}]",
        "{said}",
        "<end_of_turn>",
        "<end_of_turn>",
        ("<start_of_turn>",),
        bound=ANYWHERE,
        has_tools=False,
    ),
    "qwen3": Style(
        {"family": "qwen3"},
        '<think>\n{thought}\n</think>\n\n{said}\n<tool_call>\n{{"name": "read", "arguments": {{"path": "{path}"}}}}\n'
        "</tool_call>",
        "<think>\n{thought}\n</think>\n\n{said}",
        "<|im_end|>",
        "<|im_end|>",
        ("<|im_start|>",),
        (*THINK, '{"name": "read", "arguments": '),
    ),
    "qwen3_5": Style(
        {"family": "qwen3_5"},
        "{thought}\n</think>\n\n{said}\n\n<tool_call>\n<function=read>\n<parameter=path>\n{path}\n</parameter>\n"
        "</function>\n</tool_call>",
        "{thought}\n</think>\n\n{said}",
        "<|im_end|>",
        "<|im_end|>",
        ("<|im_start|>",),
        (*THINK, "<function=read>", "<parameter=path>", "</parameter>", "</function>"),
        bound=ANYWHERE,
    ),
    "gpt_oss": Style(
        {"family": "gpt_oss", "sliding_window": 128},
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary<|message|>{said}<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>{{"path": "{path}"}}',
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{said}",
        "<|call|>",
        "<|return|>",
        tuple(mark for mark in MARKS if mark not in ("<|call|>", "<|return|>", "<|end|>")),
        ("assistant", "analysis", "commentary", "functions", "final"),
        bound=ANYWHERE,
    ),
}


def filler(name: str, length: int) -> str:
    """A text of so many characters, each part of it another one."""
    return "".join(f"{name} {number}. " for number in range(length))[:length]


# ---- who asks


class Asked(NamedTuple):
    """A request: the tokens of its prompt and of its answer, and how many of the prompt's were cached."""

    prompt: list[int]
    answer: list[int]
    cached: int


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the start of both are the same."""
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@dataclass
class Agent:
    """A client of the server. It keeps what it has asked, to tell what was computed again."""

    engine: AsyncLLM
    style: Style
    script: Script
    salt: str | None = None
    asked: list[Asked] = field(default_factory=list)
    partings: set[tuple[int, ...]] = field(default_factory=set)  # starts that two prompts had in common
    again: list[tuple[int, int]] = field(default_factory=list)  # old tokens computed again, and the bound, by request
    number: int = 0
    more: dict[str, Any] = field(default_factory=dict)  # fields of all requests

    def call(self, messages: list[Message], path: str, **options: Any) -> list[Message]:
        """The messages after an answer that calls the tool, and its result."""
        messages = self.ask(messages, self.style.call, path=path, **options)
        if not self.style.has_tools:
            return messages
        (made,) = messages[-1]["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"path": path}
        return messages

    def result(self, messages: list[Message], text: str) -> list[Message]:
        if not self.style.has_tools:
            return [*messages, {"role": "user", "content": f"Result: {text}"}]
        return [*messages, {"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": text}]

    def final(self, messages: list[Message], **options: Any) -> list[Message]:
        return self.ask(messages, self.style.final, **options)

    def ask(
        self, messages: list[Message], form: str, *, path: str = "", streams: bool = False, **more: Any
    ) -> list[Message]:
        """The messages with the next answer, as the server gave it. more: fields of the request."""
        self.number += 1
        texts = {"thought": filler(f"thought {self.number}", 40), "said": filler(f"said {self.number}", 20).strip()}
        self.script.text = form.format(path=path, **texts)
        end = self.style.call_end if form == self.style.call else self.style.final_end
        (self.script.stop,) = self.script.tokenizer.encode(end, add_special_tokens=False)
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "return_token_ids": True, **self.more, **more}
        body["stop_token_ids"] = [self.script.stop]
        body |= {"tools": [READ]} if self.style.has_tools else {}
        body |= {"cache_salt": self.salt} if self.salt else {}
        read = streamed if streams else whole
        message, asked = read(self.engine, body)
        self._count(asked)
        return [*messages, message]

    def complete(self, text: str) -> None:
        """Another client's prompt, without an answer worth the name."""
        answer = ok(self.engine, COMPLETIONS, prompt=text, max_tokens=1, return_token_ids=True)
        (choice,) = answer["choices"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self._count(Asked(choice["prompt_token_ids"], choice["token_ids"], cached))

    def _count(self, asked: Asked) -> None:
        known = [num_common(asked.prompt, [*other.prompt, *other.answer]) for other in self.asked]
        most = max(known, default=0)
        ends = {
            end
            for common, other in zip(known, self.asked, strict=True)
            if common == most
            for end in (len(other.prompt), len(other.prompt) + len(other.answer))
        }
        start = tuple(asked.prompt[:most])
        is_known = any(abs(end - most) <= NEAR for end in ends) or start in self.partings
        self.partings.add(start)
        self.asked.append(asked)
        self.again.append((most - asked.cached, KNOWN if is_known else self.style.bound))


def whole(engine: AsyncLLM, body: dict[str, Any]) -> tuple[Message, Asked]:
    answer = ok(engine, CHAT, **body)
    (choice,) = answer["choices"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["message"], Asked(answer["prompt_token_ids"], choice["token_ids"], cached)


def streamed(engine: AsyncLLM, body: dict[str, Any]) -> tuple[Message, Asked]:
    """The message that a client makes of the parts of a stream."""
    *chunks, done = ok(engine, CHAT, stream=True, stream_options={"include_usage": True}, **body)
    assert done == "[DONE]"
    message: Message = {"role": "assistant", "content": ""}
    tokens = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning" in delta:
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({**call, "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        tokens += choice.get("token_ids", [])
    cached = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return message, Asked(chunks[0]["prompt_token_ids"], tokens, cached)


def stripped(messages: list[Message]) -> list[Message]:
    """Without the model's thinking, as many clients send answers back."""
    found = []
    for message in messages:
        kept = {name: value for name, value in message.items() if name != "reasoning"}
        if message["role"] == "assistant" and message["content"]:
            kept["content"] = message["content"].split("</think>")[-1].strip()
        found.append(kept)
    return found


def user(text: str) -> Message:
    return {"role": "user", "content": text}


# ---- ten turns


@pytest.fixture
def agent(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent whose model has the layers and the template of a family."""
    name: str = request.param
    style = STYLES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text()
    make_model(tmp_path, template=template, vocab=320, max_positions=24_576, **style.checkpoint)
    add_special(tmp_path, *style.marks, *dict.fromkeys((style.call_end, style.final_end)))
    add_special(tmp_path, *style.words, special=False)
    with AsyncLLM(str(tmp_path), device="cpu", kvcache_block_size=BLOCK, num_gpu_blocks=144) as engine:
        tokenizer = engine.llm.engine.tokenizer
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        script = Script(tokenizer, 0)
        write_by(script, monkeypatch)
        yield Agent(engine, style, script)


def turns(agent: Agent) -> None:
    system = {"role": "system", "content": filler("rule", 3000)}
    # Calls in a row, and a long result.
    messages = agent.call([system, user(filler("question 1", 200))], "a.py")
    messages = agent.call(agent.result(messages, filler("file a", 300)), "b.py", streams=True)
    messages = agent.final(agent.result(messages, filler("file b", RESULT)))
    # The next question, before which templates drop thoughts.
    asks = [*messages, user(filler("question 2", 300))]
    messages = agent.call(asks, "c.py")
    messages = agent.final(agent.result(messages, filler("file c", 300)), streams=True)
    agent.complete(filler("document", 12_000))
    # The client drops them too.
    third = [*stripped(messages), user("Are you sure?")]
    messages = agent.final(third)
    agent.final(third, **({"tool_choice": "none"} if agent.style.has_tools else {}))  # another answer to the same
    edited = [*asks[:-1], user(filler("question 2", 150) + filler("edited", 150))]
    agent.final(edited, streams=True)
    compacted = [system, user(filler("summary", 500))]
    compacted = agent.final(compacted)
    agent.final([*messages, user("And again?")])  # the session of before goes on
    agent.final([*compacted, user("Go on.")])
    agent.final([system, user(filler("another session", 300))])


@pytest.mark.parametrize("agent", fast_only(["gemma3"], STYLES), indirect=True)
def test_turns_of_an_agent_compute_no_old_tokens_again(agent: Agent) -> None:
    turns(agent)
    assert all(again <= bound for again, bound in agent.again), agent.again


@pytest.mark.parametrize("agent", ["qwen3_5"], indirect=True)
def test_thoughts_that_the_template_keeps_are_found(agent: Agent) -> None:
    """A variable of some templates keeps them, so that the next question goes on after all that was before it."""
    agent.more = {"chat_template_kwargs": {"preserve_thinking": True}}
    messages = agent.call([{"role": "system", "content": filler("rule", 1000)}, user("Question?")], "a.py")
    messages = agent.final(agent.result(messages, filler("file a", 1000)))
    agent.final([*messages, user("And now?")])
    for one, other in pairwise(agent.asked):
        assert other.prompt[: len(one.prompt) + len(one.answer)] == one.prompt + one.answer
    assert len(agent.asked) == 3 and all(again <= KNOWN for again, _ in agent.again)


@pytest.mark.parametrize("rest", [1, 5])
@pytest.mark.parametrize("agent", ["qwen3_5"], indirect=True)
def test_a_prompt_may_part_from_another_just_before_its_end(agent: Agent, rest: int) -> None:
    """It ends with "<think>", which is not there once the thought is dropped; and few tokens after a whole block."""
    system = {"role": "system", "content": filler("rule", 2500)}
    number = ok(agent.engine, "/tokenize", messages=[system, user("")], tools=[READ])["count"]
    messages = agent.final([system, user("x" * ((rest - number) % BLOCK))])
    assert len(agent.asked[0].prompt) % BLOCK == rest
    agent.final([*stripped(messages), user("Are you sure?")])
    again, bound = agent.again[-1]
    assert again <= bound == KNOWN


@pytest.mark.parametrize("agent", fast_only(["smollm2"], ["smollm2", "qwen3_5"]), indirect=True)
def test_requests_share_what_has_the_same_salt(agent: Agent) -> None:
    asked = [{"role": "system", "content": filler("rule", 1500)}, user("Hello")]
    agent.final(asked)
    for salt in ("one", "two"):
        agent.salt = salt
        agent.final(asked)
        assert agent.asked[-1].cached == 0, "nothing of another salt"
    for salt in (None, "one", "two"):
        agent.salt = salt
        agent.final(asked, streams=True)
        prompt, _, cached = agent.asked[-1]
        assert len(prompt) - BLOCK <= cached < len(prompt)


@pytest.mark.parametrize("agent", ["smollm2"], indirect=True)
def test_every_answer_says_what_was_cached(agent: Agent) -> None:
    text = filler("document", 600)
    bodies: list[tuple[str, Message]] = [
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": [text + " one", text + " two"]}),
        (CHAT, {"messages": [user(text)]}),
    ]
    for path, body in bodies:
        ok(agent.engine, path, max_tokens=2, **body)
        for more in ({}, {"n": 2}):
            usage = ok(agent.engine, path, max_tokens=2, **body, **more)["usage"]
            *_, last, done = ok(
                agent.engine, path, max_tokens=2, stream=True, stream_options={"include_usage": True}, **body, **more
            )
            assert done == "[DONE]" and last["usage"] == usage
            count = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
            assert usage["prompt_tokens_details"] == {"cached_tokens": 512 * count}, "once, however many answers"
