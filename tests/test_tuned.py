"""Tables of tuned kernel configurations: read by the device's name, else by its compute capability, and refused where
they make no sense."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.layers import dense_weight
from nanovllm.layers.dense_weight import DenseWeight
from nanovllm.ops import kernel_config
from nanovllm.ops.kernel_config import (
    FEW_ROWS,
    TABLES,
    DecodeConfig,
    FewRowsConfig,
    FewRowsEntry,
    PrefillConfig,
    TunedEntry,
    decode_config,
    decode_config_on,
    few_rows_config_on,
    prefill_config,
    prefill_config_on,
    read_table,
    tuned_entry,
)

ENTRY = TunedEntry(128, "bfloat16", PrefillConfig(64, 128, 4, 2, True), DecodeConfig(128, 8, 2, 1, 2))
GPU = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU by the name that torch gives, with its table in a directory of its own."""
    monkeypatch.setattr(kernel_config, "TABLES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for cached in (prefill_config_on, decode_config_on, few_rows_config_on):
        cached.cache_clear()
    yield tmp_path / "nvidia-h100-80gb-hbm3.json"
    for cached in (prefill_config_on, decode_config_on, few_rows_config_on):
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


def test_a_device_without_a_table_takes_that_of_its_compute_capability(device: Path) -> None:
    """The first by name; never that of another capability, and its own before all."""
    table = {"entries": [asdict(ENTRY)]}
    other = replace(ENTRY, decode=replace(ENTRY.decode, keys=32))
    (device.parent / "a-b200.json").write_text(json.dumps(table | {"capability": [10, 0]}))
    (device.parent / "b-h200.json").write_text(json.dumps({"entries": [asdict(other)], "capability": [9, 0]}))
    (device.parent / "c-gh200.json").write_text(json.dumps(table | {"capability": [9, 0]}))
    assert tuned_entry(GPU, 128, torch.bfloat16) == other
    device.write_text(json.dumps(table))
    assert tuned_entry(GPU, 128, torch.bfloat16) == ENTRY
    assert tuned_entry(torch.device("cpu"), 128, torch.bfloat16) is None


def test_every_table_of_the_package_can_be_read_and_names_its_capability() -> None:
    paths = sorted(TABLES.glob("*.json"))
    assert paths
    for path in paths:
        table = read_table(path)
        assert table.entries and table.capability and len(table.capability) == 2, path.name


def test_few_rows_are_multiplied_by_the_kernel_that_a_table_names(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FewRowsConfig(16, 64, 1, 2)
    entry = FewRowsEntry(48, 96, "float16", config)
    device.write_text(json.dumps({"entries": [], "few_rows": [asdict(entry)]}))
    assert few_rows_config_on(GPU, (48, 96), torch.float16) == config
    for shape, dtype in (((96, 48), torch.float16), ((48, 96), torch.bfloat16)):
        assert few_rows_config_on(GPU, shape, dtype) is None
    launches = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, config: FewRowsConfig) -> Tensor:
        launches.append((len(x), config))
        return F.linear(x, weight, bias)

    monkeypatch.setattr("nanovllm.ops.triton_few_rows.few_rows_linear", counted)
    monkeypatch.setattr(
        dense_weight, "few_rows_config_on", lambda device, shape, dtype: few_rows_config_on(GPU, shape, dtype)
    )
    weight = DenseWeight({"a": 40, "b": 8}, 96, torch.float16, torch.device("cpu"))
    weight.dense.normal_()
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        x = torch.randn(rows, 96).half()
        torch.testing.assert_close(weight.apply(x, None), F.linear(x, weight.dense), rtol=1e-2, atol=1e-2)
    assert launches == [(1, config), (FEW_ROWS, config)]


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
