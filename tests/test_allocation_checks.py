"""Sizes are checked in whole numbers, against limits, files and memory, before anything of them is allocated."""

from __future__ import annotations

import json
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, checkpoint_fixture, edit_config, make_checkpoint, refusal

from nanovllm import LLM, SamplingParams
from nanovllm.device import memory
from nanovllm.errors import ConfigError, RequestError
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.parallel import RankGroup
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.network_config import NetworkConfig

HUGE = ("vocab_size", "num_attention_heads")
KNOWN = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SMALL: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 80}


original = checkpoint_fixture(vocab=300)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def little_is_allocated() -> Iterator[None]:
    """What the test does adds less than 64 MB to the most memory that this process ever had."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.fixture
def only_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model with memory is built."""
    build = NetworkConfig.build

    def without_memory(
        self: NetworkConfig, dtype: torch.dtype, device: torch.device, group: RankGroup | None = None
    ) -> CausalLM:
        assert device.type == "meta"
        return build(self, dtype, device, group)

    monkeypatch.setattr(NetworkConfig, "build", without_memory)


# ---- the network


SHAPES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, {"attention_bias": True}) for family in ("qwen3", "gemma3", "olmo2", "olmo3", "glm4_moe")),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"tie": True}),
]


@pytest.mark.parametrize(("family", "options"), SHAPES, ids=str)
def test_a_model_without_memory_has_the_shapes_and_sizes_of_one_with_memory(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    alike = {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
    make_checkpoint(tmp_path, family, **options, **alike)
    config = load_network_config(tmp_path)
    declared = config.on_meta("bfloat16")
    network = declared.network
    model = config.build(torch.bfloat16, torch.device("cpu"))
    assert {name: tensor.shape for name, tensor in declared.tensors()} == {
        name: slot.shape for name, slot in model.slots()
    }
    assert network.num_weights == sum(slot.view.numel() for _, slot in model.slots())
    assert network.weight_bytes == sum(slot.view.nbytes for _, slot in model.slots())
    layers = [slot.view.nbytes for layer in model.layers for _, slot in layer.slots()]
    assert network.layer_weight_bytes() == sum(layers) // network.num_layers


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_size_in_the_config_is_compared_with_the_file(
    name: str, model: Path, little_is_allocated: None, only_on_meta: None
) -> None:
    edit_config(model, **{name: 10**9})
    message = refusal(lambda: LLM(model, **SMALL))
    assert "expected [" in message and "found [" in message and "000" in message


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_size_without_a_file_is_compared_with_the_memory(
    name: str, model: Path, little_is_allocated: None, only_on_meta: None
) -> None:
    edit_config(model, **{name: 10**9})
    message = refusal(lambda: LLM(model, load_format="dummy", **SMALL), ConfigError)
    assert "its weights take" in message and "GiB free" in message


@pytest.mark.parametrize(("field", "load_format"), [("num_hidden_layers", "auto"), ("head_dim", "dummy")])
def test_layers_and_rope_frequencies_are_counted_before_they_are_made(
    field: str, load_format: str, model: Path, little_is_allocated: None
) -> None:
    for count in (10**6, 10**9):
        edit_config(model, layer_types=..., **{field: count})
        assert f"{field}={count}" in refusal(lambda: LLM(model, load_format=load_format, **SMALL))


def test_weights_that_do_not_fit_are_refused_with_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch, little_is_allocated: None
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100_000)
    message = refusal(lambda: LLM(model, **SMALL), ConfigError)
    assert "its weights take 0.00 GiB and the device has 0.00 GiB free" in message


# ---- safetensors headers


def write_header(path: Path, header: Any, length: int | None = None, data: bytes = b"") -> None:
    """A safetensors file whose header says this."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**63]},
    ],
)
def test_a_header_that_lies_is_refused(entry: object, model: Path, little_is_allocated: None) -> None:
    write_header(model / "model.safetensors", {"model.norm.weight": entry}, data=b"\0" * 4)
    assert "truncated or damaged" in refusal(lambda: LLM(model, **SMALL))


def test_a_sparse_file_of_a_terabyte_is_not_read(model: Path, little_is_allocated: None) -> None:
    """Its header is whole, and names a tensor of another shape."""
    end = 1 << 40
    write_header(
        model / "model.safetensors",
        {"model.norm.weight": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}},
    )
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + end)
    assert "lacks tensors" in refusal(lambda: LLM(model, **SMALL))


# ---- requests


@pytest.mark.parametrize(("field", "count", "beams"), [("n", 10**9, False), ("best_of", 10**6, True)])
def test_too_many_sequences_are_refused_before_they_are_made(
    field: str, count: int, beams: bool, model: Path, little_is_allocated: None
) -> None:
    params = SamplingParams(**{field: count}, use_beam_search=beams, temperature=0.0 if beams else 1.0)
    with LLM(model, **SMALL) as llm:
        known = llm.generate([[1, 2, 3]], KNOWN, use_tqdm=False)[0].outputs[0].token_ids
        message = refusal(lambda: llm.generate([[1, 2, 3]], params, use_tqdm=False), RequestError)
        assert f"asks for {count} sequences" in message and "max_num_seqs is 512" in message
        assert llm.generate([[1, 2, 3]], KNOWN, use_tqdm=False)[0].outputs[0].token_ids == known
        assert not llm.engine.has_unfinished_requests()


# ---- engine arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_gpu_blocks": 10**9},
        {"num_gpu_blocks": 80, "num_cpu_blocks": 10**9, "enable_cpu_offload": True},
        {"num_gpu_blocks": 80, "swap_space": 1e6},
        {"max_num_batched_tokens": 2 * 10**9},
        {"num_gpu_blocks": 10**6, "max_num_batched_tokens": 10**8, "max_num_seqs": 10**8},
    ],
)
def test_engine_arguments_that_do_not_fit_are_refused_with_numbers(
    arguments: dict[str, Any], model: Path, little_is_allocated: None
) -> None:
    message = refusal(lambda: LLM(model, **arguments), ConfigError)
    assert "GiB" in message and "\n" not in message and "free" in message
