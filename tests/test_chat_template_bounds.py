"""Chat templates: the text that Transformers makes, in a process that has bounds on time, memory and output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, refusal
from tokenizer_files import CHAT_TEMPLATE, write_byte_level

from nanovllm import LLM, SamplingParams
from nanovllm.errors import RequestError
from nanovllm.text.chat_template import ChatTemplate, TemplateProcess
from nanovllm.text.chat_template import process as template_process
from nanovllm.text.tokenizer import HuggingFaceTokenizer

QUESTION = [{"role": "user", "content": "a known question"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
CONVERSATION = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "日本 <b>&</b> 😀 " + "x" * 50},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.5}}}]},
    {"role": "assistant", "content": "It goes on ", "reasoning": "because", "name": None},
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "whitespace": "{% for m in messages %}\n    {% if m.content %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': 1, 'a': '<é'} | tojson(sort_keys=true) }}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys(['x']) }}{{ namespace(self=2).self }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "macro": "{% macro f(m) %}[{{ m.content or 'none' }}]{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "special": "{{ bos_token }}{{ eos_token }}{{ documents is none }}{{ extra }}{{ messages[1].content | trim }}",
    "date": "{{ strftime_now('%Y') }}",
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None]}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=300)
    write_byte_level(path, chat_template=CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(model)


# ---- the text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [pytest.param(None, marks=pytest.mark.slow), TOOLS])
def test_the_text_is_that_of_transformers(name: str, tools: Any, tokenizer: HuggingFaceTokenizer) -> None:
    for conversation in (CONVERSATION, QUESTION * 3):
        for generation in (True, False):
            options = {"add_generation_prompt": generation, "tools": tools}
            expected = tokenizer.tokenizer.apply_chat_template(
                conversation, chat_template=TEMPLATES[name], tokenize=False, extra="more", **options
            )
            template = ChatTemplate(tokenizer, TEMPLATES[name], template_kwargs={"extra": "more"}, **options)
            assert template.prompts(conversation)[0].text == expected


@pytest.mark.parametrize("content", ["It goes on", "It goes on ", "  It\n\n", "x"])
@pytest.mark.parametrize("name", ["plain", "whitespace"])
def test_an_open_message_ends_where_transformers_ends_it(
    content: str, name: str, tokenizer: HuggingFaceTokenizer
) -> None:
    conversation = [*QUESTION, {"role": "assistant", "content": content}]
    for template in (TEMPLATES[name], TEMPLATES[name].replace("content }}", "content | trim }}")):
        expected = tokenizer.tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, continue_final_message=True
        )
        made = ChatTemplate(tokenizer, template, add_generation_prompt=False, continue_final_message=True)
        assert made.prompts(conversation)[0].text == expected


def test_an_open_message_that_the_template_drops_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    template = ChatTemplate(tokenizer, "{{ 1 }}", add_generation_prompt=False, continue_final_message=True)
    assert "continue_final_message" in refusal(lambda: template.prompts(QUESTION), RequestError)


def test_a_tokenizer_may_have_several_templates(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    named = HuggingFaceTokenizer(tmp_path)
    named.tokenizer.chat_template = {"default": "one", "tool_use": "two", "rag": "three"}
    assert ChatTemplate(named).prompts(QUESTION)[0].text == "one"
    assert ChatTemplate(named, tools=TOOLS).prompts(QUESTION)[0].text == "two"
    assert ChatTemplate(named, "rag").prompts(QUESTION)[0].text == "three"
    assert ChatTemplate(named, "four").prompts(QUESTION)[0].text == "four"
    del named.tokenizer.chat_template["default"]
    assert "rag, tool_use" in refusal(lambda: ChatTemplate(named), RequestError)


# ---- bounds

HUNGRY = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one huge power": "{{ 9 ** (9 ** 9) }}",
    "a huge text": "{% set x = 'a' * 10 ** 10 %}{{ x | length }}",
    "a huge list": "{% set x = [0] * 10 ** 10 %}",
    "padding": "{{ '%1000000000d' % 1 }}{{ '%1000000000d' % 1 }}",
    "centering": "{{ 'x' | center(10 ** 10) }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a lot of output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "output without end": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a huge range": "{% for a in range(10 ** 10) %}{% endfor %}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of CPU time is enough to see that a template is ended."""
    monkeypatch.setattr(template_process, "CPU_SECONDS", 0.9)
    monkeypatch.setattr(template_process, "MEMORY_BYTES", 300 << 20)


@pytest.mark.parametrize("name", HUNGRY)
def test_a_hungry_template_ends_with_an_error_and_the_next_one_works(name: str, short: None) -> None:
    process = TemplateProcess()
    before = os.times()
    message = refusal(lambda: process.render(HUNGRY[name], {"messages": QUESTION}), RequestError)
    after = os.times()
    assert "chat template" in message and "\n" not in message and len(message) < 500
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 10, "of CPU time"
    assert process.render("{{ messages[0].content }}", {"messages": QUESTION}) == "a known question"
    process.close()


def test_an_engine_answers_right_after_a_template_was_ended(model: Path, short: None) -> None:
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=80) as llm:
        known = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for name in ("nested loops", "a huge text", "a lot of output", "recursion"):
            refusal(lambda name=name: llm.chat(QUESTION, chat_template=HUNGRY[name]), RequestError)  # type: ignore[misc]
            assert llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == known


@pytest.mark.slow
def test_the_default_bounds_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CPU time: on a busy machine that takes longer."""
    monkeypatch.setattr(template_process, "WALL_SECONDS", 600.0)
    process, before = TemplateProcess(), os.times()
    message = refusal(lambda: process.render(HUNGRY["nested loops"], {"messages": []}), RequestError)
    after = os.times()
    assert "5 s of CPU time" in message
    assert after.children_user + after.children_system - before.children_user - before.children_system < 10


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "WALL_SECONDS", -template_process.CPU_SECONDS)
    process = TemplateProcess()
    assert "gave no answer" in refusal(lambda: process.render(HUNGRY["nested loops"], {}), RequestError)
    assert process._worker.running is None


def test_a_long_conversation_has_room() -> None:
    """Ten million characters, twice over."""
    text = "ab日😀" * 2_500_000
    process = TemplateProcess()
    rendered = process.render("{{ messages[0].content }}{{ messages[0].content }}", {"messages": [{"content": text}]})
    assert rendered == text + text


# ---- the sandbox

ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ ('{0.__class__.__mro__}').format(1) }}",
    "{% include '/etc/passwd' %}",
    "{{ dict.__subclasses__() }}",
    "{% set n = namespace(__class__=1) %}{{ n }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n }}",
    "{% import 'os' as os %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_nothing(template: str) -> None:
    with suppress(RequestError):
        assert TemplateProcess().render(template, {"messages": []}) == "", "what is not there prints as nothing"


def test_the_process_has_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment, no open files, no terminal; it ends with the engine's."""
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    process = TemplateProcess()
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        process.render("{{ 1 }}", {})
    assert process._worker.running is not None
    pid = process._worker.running.pid
    assert b"SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert not any(str(tmp_path) in link for link in links) and len(links) <= 4
    assert os.getsid(pid) == pid != os.getsid(0)
    del process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_was_killed_is_started_again() -> None:
    process = TemplateProcess()
    process.render("{{ 1 }}", {})
    assert process._worker.running is not None
    os.kill(process._worker.running.pid, signal.SIGKILL)
    process._worker.running.wait()
    assert process.render("{{ 2 }}", {}) == "2"


@pytest.mark.parametrize("variables", [{"x": object()}, {"x": {1, 2}}, {"x": b"bytes"}])
def test_what_json_cannot_express_is_refused(variables: dict[str, Any]) -> None:
    assert "JSON" in refusal(lambda: TemplateProcess().render("{{ x }}", variables), RequestError)


def test_the_worker_needs_neither_torch_nor_this_package() -> None:
    code = (
        "import sys; from nanovllm.text.chat_template import worker; "
        "print(sorted(m for m in sys.modules if 'torch' in m))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
