"""Chat templates: the text that Transformers makes, in its sandbox."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, refusal
from tokenizer_files import CHAT_TEMPLATE, write_byte_level
from transformers import PreTrainedTokenizerBase

from nanovllm.errors import RequestError
from nanovllm.text.chat_template import NOT_VARIABLES, ChatTemplate
from nanovllm.text.tokenizer import HuggingFaceTokenizer

QUESTION = [{"role": "user", "content": "a known question"}]
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
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys(['x']) }}{{ namespace(self=2).self }}",
    "macro": "{% macro f(m) %}[{{ m.content or 'none' }}]{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "special": "{{ bos_token }}{{ eos_token }}{{ documents is none }}{{ extra }}{{ messages[1].content | trim }}",
    "date": "{{ strftime_now('%Y') }}",
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None]}}}]


model = checkpoint_fixture(vocab=300, tokenizer={"chat_template": CHAT_TEMPLATE})


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


def test_an_empty_list_of_tool_calls_is_left_out(tokenizer: HuggingFaceTokenizer) -> None:
    """Clients send back answers that have one, and Llama 3.1's template refuses an answer without exactly one call."""
    single = "{% if 'tool_calls' in m and m.tool_calls | length != 1 %}{{ raise_exception('one at once') }}{% endif %}"
    template = ChatTemplate(tokenizer, f"{{% for m in messages %}}{single}{{{{ m.content }}}};{{% endfor %}}")
    answer = {"role": "assistant", "content": "Yes", "tool_calls": []}
    assert template.prompts([*QUESTION, answer])[0].text == "a known question;Yes;"
    assert answer["tool_calls"] == [], "the caller's message is unchanged"


@pytest.mark.parametrize("content", ["It goes on ", "  It\n\n"])
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


# ---- the sandbox

ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ ('{0.__class__.__mro__}').format(1) }}",
    "{% include '/etc/passwd' %}",
    "{% set n = namespace(__class__=1) %}{{ n }}",
    "{% import 'os' as os %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
)


def test_a_template_reaches_nothing(tokenizer: HuggingFaceTokenizer) -> None:
    for template in ESCAPES:
        with suppress(RequestError):
            text = ChatTemplate(tokenizer, template).prompts(QUESTION)[0].text
            assert text == "", "what is not there prints as nothing"


def test_template_arguments_are_those_of_transformers() -> None:
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(parameters) - {"self", "documents"} <= NOT_VARIABLES
