"""Damaged model directories: whatever a file holds, the engine loads it or refuses it in one sentence.

Config, generation config, index, safetensors headers and tokenizer files are mutated as values and as bytes. After
every example that is loaded, a request runs. After every refusal, the undamaged directory answers a known question once
in a while.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bounded import FuzzTarget, loaded_or_refused, split_safetensors, with_file, with_header
from checkpoints import make_checkpoint
from hypothesis import strategies as st
from tokenizer_files import CHAT_TEMPLATE, write_byte_level

from nanovllm import LLM, SamplingParams
from nanovllm.formats.config_fields import GENERATION_FIELDS, NETWORK_FIELDS, ROPE_FIELDS

SMALL: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 80, "max_num_batched_tokens": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
QUESTION = "a known question"
WEIGHTS = "model.safetensors"
GROWTH = 512 << 10  # KiB that a process of many examples may grow by: no file here has a megabyte
KNOWN_EVERY = 50  # refusals


# ---- the directory


@cache
def original() -> Path:
    path = Path(tempfile.mkdtemp(prefix="nanovllm-fuzz-"))
    atexit.register(shutil.rmtree, path)
    make_checkpoint(path, vocab=300)
    write_byte_level(path, chat_template=CHAT_TEMPLATE)
    return path


@cache
def known_answer() -> list[int]:
    return answer(original())


def answer(model: Path) -> list[int]:
    with LLM(model, **SMALL) as llm:
        return llm.generate(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def outcome(file: str, content: bytes) -> str:
    """Replace a file of the directory by `content` and load it."""
    with with_file(original(), file, content) as model:
        return loaded(model)


def loaded(model: Path) -> str:
    """Load a damaged directory and ask it. Now and then after a refusal, the undamaged one is asked."""
    known_answer()
    word = loaded_or_refused(lambda: answer(model), GROWTH)
    if word == "refused" and next(REFUSALS) % KNOWN_EVERY == 0:
        assert answer(original()) == known_answer()
    return word


REFUSALS = count(1)


# ---- values that JSON can hold, and changes to them

NUMBERS = [0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**9, 10**30, -(10**30), 10**400, 0.5, 1e-300, 1e300]
NO_NUMBERS = [None, True, False, float("nan"), float("inf"), float("-inf"), [], {}, [[]], {"": None}]
TEXTS = ["", "x", "x" * 5000, "\ud800", "a\nb", "../../etc/passwd", "/dev/zero", "__class__"]
SPECIAL = st.sampled_from([*NUMBERS, *NO_NUMBERS, *TEXTS])
VALUES = st.recursive(
    SPECIAL | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
TOKENIZER_FIELDS = (
    *("bos_token", "eos_token", "tokenizer_class", "auto_map", "model_max_length", "chat_template"),
    *("response_template", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
    *("padding_side", "truncation_side", "add_bos_token", "add_prefix_space", "clean_up_tokenization_spaces"),
)
# Of all config classes, and what every object of one has.
OF_CLASSES = {"attention_bias", "hidden_act", "initializer_range", "per_layer_config", "id2label", "num_labels"}
OF_CLASSES |= {"output_attentions", "get_text_config", "attribute_map", "pad_token_id", "use_sliding_window"}
NAMES = sorted({*NETWORK_FIELDS, *OF_CLASSES, *ROPE_FIELDS, *GENERATION_FIELDS, *TOKENIZER_FIELDS, "weight_map"})
# A change: where (numbers that choose a member at each level), what to do there, and with what.
CHANGES = st.lists(
    st.fixed_dictionaries(
        {
            "path": st.lists(st.integers(0, 400), min_size=1, max_size=5),
            "deed": st.sampled_from(["set", "remove", "add", "copy"]),
            "name": st.sampled_from(NAMES) | st.text(max_size=6),  # of what is added
            "value": VALUES,
        }
    ),
    min_size=1,
    max_size=4,
)


def changed(content: Any, changes: list[dict[str, Any]]) -> Any:
    for change in changes:
        content = _changed(content, change["path"], change["deed"], change["name"], change["value"])
    return content


def _changed(content: Any, path: list[int], deed: str, name: str, value: Any) -> Any:
    """A copy of `content` with one member changed, wherever the path leads."""
    if not isinstance(content, dict | list) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    made = content.copy()
    if len(path) > 1 and isinstance(content[key], dict | list):
        made[key] = _changed(content[key], path[1:], deed, name, value)
    elif deed == "remove":
        del made[key]
    elif deed == "set" or isinstance(made, list):
        made[key] = value
    elif deed == "copy":
        made[key] = content[keys[(path[0] + 1) % len(keys)]]
    else:
        made[name] = value
    return made


def as_json(content: Any) -> bytes:
    return json.dumps(content).encode() if not _too_long(content) else str(content).encode("utf-8", "replace")


def _too_long(content: Any) -> bool:
    """Whether json refuses a whole number for its digits."""
    try:
        json.dumps(content)
    except ValueError:
        return True
    return False


LONG_BYTES = (b"[" * 20_000, b'{"a":' * 20_000, b"9" * 6000)
# Damage to bytes: (where, as a share of 2**16; what happens there; bytes).
DAMAGE = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 2**16 - 1),
            "deed": st.sampled_from(["cut", "insert", "overwrite", "drop"]),
            "bytes": st.binary(min_size=1, max_size=12) | st.sampled_from(LONG_BYTES),
        }
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, damage: list[dict[str, Any]], end: int | None = None) -> bytes:
    """`content` with damage in its first `end` bytes."""
    for part in damage:
        at = part["at"] * (len(content) if end is None else min(end, len(content))) >> 16
        new = part["bytes"]
        if part["deed"] == "cut":
            content = content[:at]
        elif part["deed"] == "insert":
            content = content[:at] + new + content[at:]
        elif part["deed"] == "overwrite":
            content = content[:at] + new + content[at + len(new) :]
        else:
            content = content[:at] + content[at + len(new) :]
    return content


# ---- targets


def by_values(file: str) -> Callable[..., str]:
    def check(changes: list[dict[str, Any]]) -> str:
        content = json.loads((original() / file).read_text())
        return outcome(file, as_json(changed(content, changes)))

    return check


def by_bytes(file: str) -> Callable[..., str]:
    def check(damage: list[dict[str, Any]]) -> str:
        return outcome(file, damaged((original() / file).read_bytes(), damage))

    return check


def header_by_values(changes: list[dict[str, Any]]) -> str:
    header, data = split_safetensors(original() / WEIGHTS)
    return outcome(WEIGHTS, with_header(as_json(changed(header, changes)), data))


def header_by_bytes(damage: list[dict[str, Any]]) -> str:
    """The length and the header are damaged, not the data: any data is weights."""
    header, _ = split_safetensors(original() / WEIGHTS)
    return outcome(WEIGHTS, damaged((original() / WEIGHTS).read_bytes(), damage, 8 + len(json.dumps(header))))


def index_by_values(changes: list[dict[str, Any]]) -> str:
    """The index of a checkpoint in two files, of which one is the other's name for the same tensors."""
    header, _ = split_safetensors(original() / WEIGHTS)
    names = sorted(name for name in header if name != "__metadata__")
    index = {"metadata": {"total_size": 5}, "weight_map": {name: "part.safetensors" for name in names}}
    with tempfile.TemporaryDirectory(prefix="nanovllm-fuzz-") as name:
        model = Path(name)
        for path in original().iterdir():
            target = "part.safetensors" if path.name == WEIGHTS else path.name
            shutil.copyfile(path, model / target)
        (model / "model.safetensors.index.json").write_bytes(as_json(changed(index, changes)))
        return loaded(model)


BY_VALUES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
TARGETS = (
    *(FuzzTarget(f"{file}-values", by_values(file), changes=CHANGES) for file in BY_VALUES),
    *(FuzzTarget(f"{file}-bytes", by_bytes(file), damage=DAMAGE) for file in BY_VALUES),
    FuzzTarget("safetensors-values", header_by_values, changes=CHANGES),
    FuzzTarget("safetensors-bytes", header_by_bytes, damage=DAMAGE),
    FuzzTarget("index-values", index_by_values, changes=CHANGES),
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_files_are_loaded_or_refused(target: FuzzTarget) -> None:
    target.replay()
    target.run_examples(12)
