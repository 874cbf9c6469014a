"""Reading weights: what is accepted, and what is refused with its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, refusal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.layers.causal_lm import CausalLM
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model

CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint(root / "single", "qwen3")
    make_checkpoint(root / "tied", "qwen3", tie=True)
    make_checkpoint(root / "sharded", "qwen3", sharded=True)
    return root


@pytest.fixture
def copy_of(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return copied


@pytest.fixture
def single(copy_of: Callable[[str], Path]) -> Path:
    return copy_of("single")


def load(path: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto", seed: int = 0) -> CausalLM:
    return load_model(path, load_network_config(path), dtype, CPU, load_format, seed)


def edit_tensors(path: Path, changes: dict[str, Tensor | None]) -> None:
    """Set tensors of model.safetensors; None removes one."""
    file = path / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def stored_tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ["single", "tied", "sharded"])
def test_every_tensor_lands_in_its_place(originals: Path, name: str) -> None:
    stored = stored_tensors(originals / name)
    decoder = load(originals / name, load_format="safetensors")
    slots = dict(decoder.slots())
    assert slots.keys() == stored.keys()
    for tensor_name, slot in slots.items():
        assert torch.equal(slot.view, stored[tensor_name].expand(slot.view.shape)), tensor_name
    assert (decoder.lm_head is decoder.embedding) == (name == "tied")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_on_the_way(single: Path, dtype: torch.dtype) -> None:
    edit_tensors(single, {NORM: torch.linspace(0, 2, 64).double()})
    stored = stored_tensors(single)
    decoder = load(single, dtype)
    assert torch.equal(decoder.norm.data, stored[NORM].to(dtype))
    assert torch.equal(decoder.lm_head.weight.dense, stored[LM_HEAD].to(dtype))
    assert all(slot.view.dtype == dtype for _, slot in decoder.slots())


WRONG_TENSORS: list[tuple[dict[str, Tensor | None], tuple[str, ...]]] = [
    ({K_PROJ: None, NORM: None}, ("(2: ", K_PROJ, NORM)),
    ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, ("model.layers.0.self_attn.q_proj.bias",)),
    ({K_PROJ: torch.zeros(32, 63)}, (f"{K_PROJ} expected [32, 64], found [32, 63]",)),
    ({NORM: torch.zeros(1)}, (f"{NORM} expected [64], found [1]",)),  # would broadcast
    ({K_PROJ: torch.zeros(32, 64, dtype=torch.int8)}, (f"{K_PROJ} I8", "BF16")),
    ({f"unknown.{number}": torch.zeros(1) for number in range(22)}, ("(22: ", "and 17 more")),
]


def test_wrong_tensors_are_named(single: Path) -> None:
    content = (single / "model.safetensors").read_bytes()
    for changes, words in WRONG_TENSORS:
        edit_tensors(single, changes)
        message = refusal(lambda: load(single))
        assert [word for word in (str(single), *words) if word not in message] == []
        (single / "model.safetensors").write_bytes(content)


def test_other_files_of_published_checkpoints_are_left_alone(originals: Path, copy_of: Callable[[str], Path]) -> None:
    """A second copy of the weights in another layout or pickled, what is for images, and fields that are not known."""
    path = copy_of("sharded")
    (path / "original").mkdir()
    for name in ("consolidated.safetensors", "pytorch_model-00001-of-00002.bin", "original/consolidated.00.pth"):
        (path / name).write_bytes(b"no weights")
    for name in ("preprocessor_config.json", "processor_config.json", "params.json"):
        (path / name).write_text("{}")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index |= {"metadata": {"total_size": 1, "total_parameters": 1, "format": "pt"}, "version": "1"}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    own, other = (dict(load(each).slots()) for each in (path, originals / "sharded"))
    assert own.keys() == other.keys() and all(torch.equal(own[name].view, other[name].view) for name in own)


def test_truncated_and_damaged_files_are_refused(single: Path) -> None:
    file = single / "model.safetensors"
    content = file.read_bytes()
    for damaged in (b"", content[:5], content[: len(content) // 2], content[:-1], b"\xff" * 1000):
        file.write_bytes(damaged)
        message = refusal(lambda: load(single))
        assert str(file) in message and "truncated or damaged" in message


def test_a_directory_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").rename(single / "consolidated.safetensors")
    message = refusal(lambda: load(single))
    assert "model.safetensors" in message and "consolidated.safetensors" in message
    (single / "consolidated.safetensors").rename(single / "pytorch_model.bin")
    message = refusal(lambda: load(single))
    assert "pytorch_model.bin" in message and "save_pretrained" in message
    (single / "pytorch_model.bin").unlink()
    assert str(single) in refusal(lambda: load(single))


def test_tensors_that_the_index_does_not_list_are_not_read(
    copy_of: Callable[[str], Path], originals: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that the network does not have, and another value of one that is elsewhere."""
    path = copy_of("sharded")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = path / next(file for file in index.values() if file != index[NORM])
    added = {"ghost": torch.zeros(3), NORM: torch.full_like(stored_tensors(path)[NORM], 7)}
    save_file(load_file(shard) | added, shard)
    found = load(path)
    assert "does not list are not read (2)" in caplog.text
    for (name, slot), (_, expected) in zip(found.slots(), load(originals / "sharded").slots(), strict=True):
        assert torch.equal(slot.view, expected.view), name


def test_bad_indexes_are_refused(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("sharded")
    index = path / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    without_norm = {name: file for name, file in weights.items() if name != NORM}
    for wrong, word in (
        ({**weights, NORM: "model-9.safetensors"}, "model-9.safetensors"),
        ({**weights, NORM: "../x"}, "../x"),
        ({**weights, "ghost": "model-00001-of-00004.safetensors"}, "ghost in model-00001"),
        (without_norm, NORM),
        ({}, "weight_map"),
        ([], str(index)),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        assert word in refusal(lambda: load(path))
    index.write_text("{")
    assert str(index) in refusal(lambda: load(path))


def test_known_harmless_tensors_are_accepted(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("tied")
    embedding = stored_tensors(path)[EMBEDDING]
    extras: dict[str, Tensor | None] = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8),
        LM_HEAD: embedding.clone(),
    }
    edit_tensors(path, extras)
    with safe_open(path / "model.safetensors", "pt") as file:
        assert set(extras) <= set(file.keys())
    assert torch.equal(load(path).embedding.weight.dense, embedding)


def test_a_tied_embedding_may_be_stored_under_its_other_name(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("tied")
    embedding = stored_tensors(path)[EMBEDDING]
    edit_tensors(path, {EMBEDDING: None, LM_HEAD: embedding})
    assert torch.equal(load(path).embedding.weight.dense, embedding)


def test_a_tied_head_that_differs_is_refused(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("tied")
    embedding = stored_tensors(path)[EMBEDDING]
    for other in (embedding + 1, embedding[:-1].clone()):
        edit_tensors(path, {LM_HEAD: other})
        message = refusal(lambda: load(path))
        assert LM_HEAD in message and "tie_word_embeddings" in message


# ---- dummy weights


def test_dummy_weights_need_a_config_alone_and_come_from_the_seed(single: Path) -> None:
    (single / "model.safetensors").unlink()

    def weights(seed: int) -> dict[str, Tensor]:
        return {name: slot.view for name, slot in load(single, load_format="dummy", seed=seed).slots()}

    first = weights(1)
    again = weights(1)
    other = weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
