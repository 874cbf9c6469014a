"""Damaged quantized checkpoints: `quantization_config` and safetensors headers, loaded or refused in one sentence.

Their fields, shapes, types and offsets are changed as values; test_model_files.py damages a header's bytes.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bounded import FuzzTarget, loaded_or_refused, split_safetensors, with_file, with_header
from checkpoints import make_checkpoint
from hypothesis import strategies as st
from quantized_checkpoints import quantize
from test_model_files import CHANGES, as_json, changed

from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model

GROWTH = 64 << 10  # KiB that the process may grow by besides the file
WEIGHTS = "model.safetensors"
FORMS = ("gptq-32-asymmetric", "awq-32", "pack-quantized-asymmetric", "fp8", "fp8-tensor")
FORM = st.sampled_from(FORMS)


@cache
def original(form: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nanovllm-fuzz-"))
    atexit.register(shutil.rmtree, folder)
    make_checkpoint(folder / "plain", layers=1, hidden=64, intermediate=64, heads=4, kv_heads=2, vocab=60)
    return quantize(folder / "plain", folder / form, form)


def outcome(form: str, file: str, content: bytes) -> str:
    """Replace a file of the checkpoint by `content` and load it."""
    with with_file(original(form), file, content) as model:
        _load(original(form))
        return loaded_or_refused(lambda: _load(model), GROWTH + len(content) // 1024, model.name)


def _load(model: Path) -> None:
    """Load the weights and compute with them."""
    config = load_network_config(model)
    decoder = load_model(model, config, torch.float32, torch.device("cpu"), free_bytes=1 << 30)
    layer = decoder.layers[0]
    for linear in layer.linears:
        assert linear(torch.ones(1, linear.in_features)).shape == (1, sum(linear.parts.values()))


def config_by_values(form: str, changes: list[dict[str, Any]]) -> str:
    config = json.loads((original(form) / "config.json").read_text())
    config["quantization_config"] = changed(config["quantization_config"], changes)
    return outcome(form, "config.json", as_json(config))


def header_by_values(form: str, changes: list[dict[str, Any]]) -> str:
    header, data = split_safetensors(original(form) / WEIGHTS)
    return outcome(form, WEIGHTS, with_header(as_json(changed(header, changes)), data))


def _target(name: str, check: Callable[..., str], **strategies: Any) -> FuzzTarget:
    return FuzzTarget(f"quantized-{name}", check, form=FORM, **strategies)


TARGETS = (
    _target("config-values", config_by_values, changes=CHANGES),
    _target("header-values", header_by_values, changes=CHANGES),
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_files_are_loaded_or_refused(target: FuzzTarget) -> None:
    target.replay()
    target.run_examples(15)
