"""The formats of tool calls by name, as vLLM names its parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from nanovllm.apps.tool_calls import gemma, harmony, json_formats, python_formats, xml_formats
from nanovllm.apps.tool_calls.reader import Parser, Tools
from nanovllm.apps.tool_calls.xml_formats import Tags, XmlCalls


@dataclass(frozen=True)
class Format:
    """make: a parser for one answer. marks: the texts that it looks for, some of them special tokens of tokenizers."""

    make: Callable[[Tools], Parser]
    marks: tuple[str, ...]


def _xml(tags: Tags) -> Format:
    return Format(partial(XmlCalls, tags=tags), tags.all)


def _python(marks: python_formats.Marks) -> Format:
    return Format(partial(python_formats.PythonCalls, marks=marks), (marks.begin, marks.end))


def _json(begin: str, end: str) -> Format:
    return Format(partial(json_formats.MarkedJson, begin=begin, end=end), (begin, *([end] if end else [])))


_LLAMA_JSON = Format(json_formats.Llama3Json, ("<|python_tag|>",))

# In this order a template is compared with them: Qwen's parser reads a call of Seed-OSS too.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "hermes": _json("<tool_call>", "</tool_call>"),
        "seed_oss": _xml(xml_formats.SEED),
        "qwen3_xml": _xml(xml_formats.QWEN3),
        "qwen3_coder": _xml(xml_formats.QWEN3),
        "glm45": _xml(xml_formats.GLM),
        "glm47": _xml(xml_formats.GLM),
        "minimax_m2": _xml(xml_formats.MINIMAX),
        "mistral": Format(json_formats.Mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        "gemma4": Format(gemma.GemmaCalls, ("<|tool_call>", "<tool_call|>", gemma.QUOTE)),
        "openai": Format(harmony.Harmony, harmony.MARKS),
        "olmo3": _python(python_formats.OLMO),
        "lfm2": _python(python_formats.LFM),
        "llama3_json": _LLAMA_JSON,
        "llama4_json": _LLAMA_JSON,
        "pythonic": _python(python_formats.LLAMA),
        "llama4_pythonic": _python(python_formats.LLAMA),
        "phi4_mini_json": _json("functools", ""),
    }
)
PARSERS = ("auto", *FORMATS, "none")  # what --tool-call-parser may be
PARSER_HELP = "format of tool calls, as vLLM names them; auto: as the chat template writes them; none: calls stay text"
