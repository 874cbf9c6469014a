"""Adapters that cannot be used: each is refused before anything runs, with the field or the tensor, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, token_ids
from lora_helpers import adapter_tensors, write_adapter
from torch import Tensor
from transformers import PreTrainedModel

from nanovllm import LLM
from nanovllm.errors import ModelError, RequestError
from nanovllm.features.lora.adapter_files import read_adapter
from nanovllm.features.lora.weights import read_packed
from nanovllm.lora_request import LoRARequest
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model

Tensors = dict[str, Tensor]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("model")
    return path, make_checkpoint(path)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, PreTrainedModel]) -> Any:
    with LLM(model[0], device="cpu", num_gpu_blocks=8, enable_lora=True, max_lora_rank=8) as llm:
        yield llm


def check_refused(llm: LLM, lora_request: object, says: str) -> None:
    """Refused with this sentence, and the engine goes on as before."""
    expected = token_ids(llm, [1, 2, 3], greedy(2))
    with pytest.raises(RequestError) as refusal:
        llm.generate([[1, 2, 3], [4]], greedy(2), use_tqdm=False, lora_request=[None, lora_request])  # type: ignore[list-item]
    message = str(refusal.value)
    assert says in message, message
    assert "\n" not in message and len(message) < 700
    assert not llm.engine.has_unfinished_requests()
    assert token_ids(llm, [1, 2, 3], greedy(2)) == expected


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type='IA3': must be one of LORA"),
    "a rank that is too large": ({"r": 16}, "has rank 16, and max_lora_rank=8: raise max_lora_rank to 16"),
    "DoRA": ({"use_dora": True}, "'use_dora'=True: not supported: only plain LoRA is applied; merge the adapter"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4': must be a way that leaves"),
    "a module without tensors": (
        {"target_modules": ["q_proj", "v_proj"]},
        "lacks base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight, which adapter_config.json",
    ),
    "a tensor that is not named": (
        {"target_modules": ["v_proj"]},
        "q_proj.lora_A.weight': target_modules of adapter_config.json does not name it",
    ),
    "a pattern": ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern has '(a+)+b': not supported: only names of modules"),
    "a rank in a pattern": ({"rank_pattern": {"q_proj": -4}}, "rank_pattern: q_proj=-4: must be a whole number"),
}


def test_configs_that_mean_something_else(llm: LLM, model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    tensors = adapter_tensors(model[1], ["q_proj"])
    for name, (config, says) in CONFIGS.items():
        path = write_adapter(tmp_path / name, tensors, **{"target_modules": ["q_proj"], **config})
        check_refused(llm, LoRARequest("a", 1, str(path), load_inplace=True), says)


TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "none": (lambda t: {}, "holds no tensors"),
    "B alone": (
        lambda t: {f"{Q0}.lora_B.weight": t[f"{Q0}.lora_B.weight"]},
        f"lacks {Q0}.lora_A.weight, which",
    ),
    "of a wider model": (
        lambda t: {**t, f"{Q0}.lora_B.weight": torch.zeros(128, 4)},
        f"{Q0}.lora_B.weight expected [64, 4], found [128, 4]: take an adapter of this model",
    ),
    "of integers": (
        lambda t: {**t, f"{Q0}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)},
        f"{Q0}.lora_A.weight is I8: not read; read are F64",
    ),
    "of a deeper model": (
        lambda t: {**t, f"{Q0.replace('0', '2')}.lora_A.weight": torch.zeros(4, 64)},
        "layers.2.self_attn.q_proj.lora_A.weight': a Qwen3ForCausalLM of 2 layers has no such linear layer",
    ),
    "of a bias": (
        lambda t: {**t, f"{Q0}.lora_B.bias": torch.zeros(64)},
        "lora_B.bias': not supported: only lora_A and lora_B are read",
    ),
}


def test_tensors_that_do_not_fit_the_model(llm: LLM, model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    for name, (change, says) in TENSORS.items():
        tensors = change(adapter_tensors(model[1], ["q_proj"]))
        targets = ".*q_proj" if "lacks" in says else ["q_proj"]
        path = write_adapter(tmp_path / name, tensors, target_modules=targets)
        check_refused(llm, LoRARequest("a", 1, str(path), load_inplace=True), says)


def test_requests_that_name_no_adapter(llm: LLM, model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a", adapter_tensors(model[1], ["q_proj"])))
    check_refused(llm, 5, "lora_request=5: must be a LoRARequest")
    check_refused(llm, {"lora_name": "a"}, "lora_request={'lora_name': 'a'}: must be a LoRARequest")
    check_refused(llm, LoRARequest("a", 77, str(tmp_path / "none")), "none is not a directory")
    check_refused(llm, LoRARequest("a", 77, "a" * 300), "aaa is not a directory")
    check_refused(llm, LoRARequest("a", 77, "~nobody-of-this-name"), "used: '~nobody-of-this-name' is not a path")
    llm.generate([1], greedy(1), use_tqdm=False, lora_request=LoRARequest("a", 78, path))
    other = str(write_adapter(tmp_path / "b", adapter_tensors(model[1], ["q_proj"])))
    check_refused(llm, LoRARequest("b", 78, other), "lora_int_id=78 of 'b' belongs to the adapter in ")
    with pytest.raises(RequestError, match="2 prompts and 1 lora_requests: give one for all, or one"):
        llm.generate([[1], [2]], greedy(1), lora_request=[LoRARequest("a", 78, path)])
    for arguments, says in (
        (("", 1, path), "lora_name='': must be text that is not empty"),
        (("a", 0, path), "lora_int_id=0: must be a whole number of at least 1"),
        (("a", 1, "a\0b"), r"lora_path='a\\x00b': must be the path"),
    ):
        with pytest.raises(RequestError, match=f"LoRARequest: {says}"):
            LoRARequest(*arguments)


@pytest.mark.parametrize(
    "value, dtype, says", [(float("nan"), "float32", "NaN or infinity"), (1e5, "float16", "beyond")]
)
def test_numbers_that_are_not_finite_end_their_request_alone(
    value: float, dtype: str, says: str, model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """Tensors are read when a request begins to run."""
    tensors = adapter_tensors(model[1], ["q_proj"])
    tensors[f"{Q0}.lora_B.weight"][0, 0] = value
    path = write_adapter(tmp_path / "a", tensors)
    with LLM(model[0], device="cpu", dtype=dtype, num_gpu_blocks=8, enable_lora=True) as llm:
        lora_requests = [LoRARequest("a", 1, str(path)), None]
        failed, other = llm.generate([[1, 2], [1, 2]], greedy(3), use_tqdm=False, lora_request=lora_requests)
        assert failed.outputs[0].finish_reason == "error" and failed.error is not None
        assert f"{Q0}.lora_B.weight holds" in failed.error and says in failed.error
        assert [other.outputs[0].token_ids] == token_ids(llm, [1, 2], greedy(3))


def test_mutated_files_are_refused_or_read(model: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Bytes of the config or of the header of the tensors are changed, cut or repeated: no other error comes out."""
    own = load_model(model[0], load_network_config(model[0]), torch.float32, torch.device("cpu"))
    path = write_adapter(tmp_path / "a", adapter_tensors(model[1], ["q_proj"]))
    random = Random(1)
    original = {name: (path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    refused = 0
    for _ in range(150):
        name = random.choice(list(original))
        content = bytearray(original[name])
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(min(len(content), 900))
            new = bytes(random.choice(b'0123456789{}[]",:-eE \0\xff') for _ in range(random.randrange(3)))
            content[at : at + random.randrange(3)] = new
        (path / name).write_bytes(bytes(content[: random.choice([len(content), len(content), random.randrange(900)])]))
        try:
            read_packed(path, read_adapter(path, own.network, 8), own)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1500
        (path / name).write_bytes(original[name])
    assert 75 < refused < 150
    read_packed(path, read_adapter(path, own.network, 8), own)
