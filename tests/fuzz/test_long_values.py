"""Every field of every JSON file with values that are long in a message, have line breaks, or cannot be shown at all.

Random examples rarely put such a value into a certain field. The checks are those of the other tests of this folder:
the file is loaded, or refused in one sentence of moderate length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bounded import LONGEST
from checkpoints import make_checkpoint
from fast import fast_only
from lora_helpers import adapter_tensors, write_adapter
from test_model_files import BY_VALUES, OF_CLASSES, TOKENIZER_FIELDS, as_json, original, outcome
from test_quantized_fuzz import FORMS
from test_quantized_fuzz import original as quantized
from test_quantized_fuzz import outcome as quantized_outcome

from nanovllm.data.network import Network
from nanovllm.errors import ModelError
from nanovllm.features.lora.adapter_files import CONFIG, FIELDS, read_adapter
from nanovllm.formats.config_fields import GENERATION_FIELDS, NETWORK_FIELDS, ROPE_FIELDS
from nanovllm.models.hf_config import load_network_config

JSON_VALUES: dict[str, Any] = {
    "long text": "x" * 5000,
    "line break": "a\nb",
    "nested lists": json.loads("[" * 900 + "]" * 900),
    "nested objects": json.loads('{"a":' * 900 + "1" + "}" * 900),
    "huge number": 10**400,
    "long list": ["y\n" * 5] * 3000,
    "long name": ["x" * 5000 + ".embed_tokens"],
    "large object": {f"key {i}\n": i for i in range(3000)},
    "long key": {"k" * 5000: "1"},
    "half a character": "\ud800",
    "true": True,
}
FAST = ("long text", "nested objects", "huge number")
KNOWN = {
    "config.json": (*NETWORK_FIELDS, *OF_CLASSES),
    "generation_config.json": tuple(GENERATION_FIELDS),
    "tokenizer_config.json": TOKENIZER_FIELDS,
    "tokenizer.json": (),
}
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def paths(content: Any, path: tuple[Any, ...] = (), depth: int = 2) -> Iterator[tuple[Any, ...]]:
    """Where the values in objects and lists are, the whole content first."""
    yield path
    if depth and isinstance(content, dict | list):
        keys = content if isinstance(content, dict) else range(len(content))
        for key in keys:
            yield from paths(content[key], (*path, key), depth - 1)


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = content.copy()
    made[path[0]] = with_value(made.get(path[0]) if isinstance(made, dict) else made[path[0]], path[1:], value)
    return made


@pytest.mark.parametrize("value", fast_only(FAST, JSON_VALUES))
@pytest.mark.parametrize("file", BY_VALUES)
def test_model_files(file: str, value: str) -> None:
    content = json.loads((original() / file).read_text())
    content_depth = 1 if file == "tokenizer.json" else 2
    for path in {**dict.fromkeys(paths(content, depth=content_depth)), **{(name,): None for name in KNOWN[file]}}:
        outcome(file, as_json(with_value(content, path, JSON_VALUES[value])))


@pytest.mark.parametrize("value", fast_only(FAST, JSON_VALUES))
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_parameters(kind: str, value: str) -> None:
    content = json.loads((original() / "config.json").read_text())
    for name in ROPE_FIELDS:
        rope = {"rope_type": kind, "factor": 2.0, name: JSON_VALUES[value]}
        outcome("config.json", as_json({**content, "rope_parameters": rope}))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_quantization_config(form: str) -> None:
    content = json.loads((quantized(form) / "config.json").read_text())
    for path in paths(content["quantization_config"], ("quantization_config",), depth=5):
        for value in JSON_VALUES.values():
            quantized_outcome(form, "config.json", as_json(with_value(content, path, value)))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a model and of an adapter."""
    path = tmp_path_factory.mktemp("lora")
    model = make_checkpoint(path / "model", layers=1, hidden=32, intermediate=32, vocab=60)
    return path / "model", write_adapter(path / "adapter", adapter_tensors(model))


@pytest.mark.parametrize("value", fast_only(FAST, JSON_VALUES))
def test_adapter_config(adapter: tuple[Path, Path], value: str) -> None:
    model, directory = adapter
    network = load_network_config(model).network
    content = json.loads((directory / CONFIG).read_text())
    try:
        for name in {**FIELDS, "of the future\n": None}:
            (directory / CONFIG).write_bytes(as_json({**content, name: JSON_VALUES[value]}))
            refusal = _refusal(directory, network)
            assert "\n" not in refusal and len(refusal) < LONGEST, refusal
    finally:
        (directory / CONFIG).write_text(json.dumps(content))


def _refusal(directory: Path, network: Network) -> str:
    try:
        read_adapter(directory, network, max_lora_rank=8)
    except ModelError as error:
        return str(error)
    return ""
