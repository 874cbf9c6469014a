"""Tables of tuned kernel configurations: read by the device's name, refused where they make no sense."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.ops import kernel_config
from nanovllm.ops.kernel_config import (
    DecodeConfig,
    PrefillConfig,
    TunedEntry,
    decode_config,
    decode_config_on,
    prefill_config,
    prefill_config_on,
    table_path,
    tuned_entry,
)

ENTRY = TunedEntry(128, "bfloat16", PrefillConfig(64, 128, 4, 2, True), DecodeConfig(128, 8, 2, 1, 2))
GPU = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU by the name that torch gives, with its table in a directory of its own."""
    monkeypatch.setattr(kernel_config, "table_path", lambda name: table_path(name, tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for cached in (prefill_config_on, decode_config_on):
        cached.cache_clear()
    yield tmp_path / "nvidia-h100-80gb-hbm3.json"
    for cached in (prefill_config_on, decode_config_on):
        cached.cache_clear()


def test_the_table_decides_for_its_heads_and_dtype_alone(device: Path) -> None:
    device.write_text(json.dumps({"entries": [asdict(ENTRY)]}))
    assert tuned_entry(GPU, 128, torch.bfloat16) == ENTRY
    assert prefill_config_on(GPU, 128, torch.bfloat16) == ENTRY.prefill
    assert decode_config_on(GPU, 128, torch.bfloat16) == ENTRY.decode
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        assert tuned_entry(GPU, head_dim, dtype) is None
        assert prefill_config_on(GPU, head_dim, dtype) == prefill_config(head_dim, dtype, (9, 0))
        assert decode_config_on(GPU, head_dim, dtype) == decode_config(head_dim, dtype)


def test_one_process_keeps_one_configuration(device: Path) -> None:
    """The bits of a request must not change because a file did."""
    before = prefill_config_on(GPU, 128, torch.bfloat16)
    device.write_text(json.dumps({"entries": [asdict(ENTRY)]}))
    assert prefill_config_on(GPU, 128, torch.bfloat16) == before


@pytest.mark.parametrize(
    "text",
    ["nonsense", "[]", '{"entries": [{"head_dim": 128}]}', json.dumps({"entries": [asdict(ENTRY) | {"colour": 1}]})],
)
def test_a_spoilt_table_is_refused_in_a_sentence(text: str, device: Path) -> None:
    device.write_text(text)
    with pytest.raises(ConfigError, match=r"nvidia-h100-80gb-hbm3.json is no table of tuned kernels .* delete it, or"):
        tuned_entry(GPU, 128, torch.bfloat16)
