"""Layers with experts on a GPU, without one: what they launch, and that the host never waits for what they compute.

Torch's tensors without data say what is launched and raise where a value is read. Triton's kernels are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpt_oss import PUBLISHED
from test_triton_experts import MXFP4, ROUTERS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from nanovllm.data.network import ExpertSpec, RopeSpec
from nanovllm.formats.gguf import model as gguf_model
from nanovllm.formats.gguf.model import GgufMethod
from nanovllm.layers import experts as experts_module
from nanovllm.layers.experts import Experts
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.linear_method import LinearMethod
from nanovllm.models import decoder
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import read_decoder_spec
from nanovllm.ops import gguf_planes, packed_weights, row_kernels, triton_experts, triton_rows

GPU = torch.device("cuda")
# Of a layer's attention: K and V are stored, an output and its LSE are begun, perhaps with sinks, two kernels attend
# and the output is rounded.
ATTENTION = 7
ANGLES = 6  # of the rotary embedding of a step: products, cosines and sines
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "_reshape_alias", "prim::device")


QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operators that compute something, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in FREE:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Angles:
    """Stands for `RotaryEmbedding`, whose launches are ANGLES: torch indexes no GPU's tensors without CUDA."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.head_dim = head_dim

    def cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(positions), 1, self.head_dim)
        return torch.empty(shape, device=GPU), torch.empty(*shape[:2], shape[2] // 2, device=GPU)

    def query_scale(self, positions: Tensor, dtype: torch.dtype) -> None:
        return None


def in_planes(scheme: str, rows: Tensor, in_features: int) -> Tensor:
    return torch.empty(len(rows), gguf_planes.plane_bytes(scheme, in_features), dtype=torch.uint8, device=GPU)


def without_room(scheme: str, out_features: int, in_features: int, device: torch.device) -> Tensor:
    """As `gguf_planes.empty_rows`, without indexing a GPU's tensor."""
    planes = gguf_planes.PLANES[scheme]
    row_bytes = in_features // planes.block_inputs * planes.block_bytes
    return torch.empty(out_features, row_bytes, dtype=torch.uint8, device=device)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Of what is computed within, on a GPU that multiplies fp8 and runs Triton's kernels."""
    for module in (experts_module, packed_weights):
        monkeypatch.setattr(module, "use_triton", lambda tensor: tensor.is_cuda)
    monkeypatch.setattr(row_kernels, "triton_runs", lambda: True)
    monkeypatch.setattr(triton_experts, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(decoder, "RotaryEmbedding", Angles)
    monkeypatch.setattr(gguf_planes, "rows_to_planes", in_planes)
    monkeypatch.setattr(gguf_model, "empty_rows", without_room)
    row_kernels._cuda_kernels.cache_clear()
    counting = Launches()
    monkeypatch.setattr(triton_rows, "copy_", lambda target, source: counting.names.update(["copy_"]))

    def counted(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counting.names[kernel.fn.__name__] += 1

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    with FakeTensorMode():
        yield counting
    row_kernels._cuda_kernels.cache_clear()


def gguf(spec: ExpertSpec, *types: str) -> GgufMethod:
    """Gate, up and down of every expert in these types."""
    modules = [spec.expert(0, index) for index in range(spec.num_experts)]
    return GgufMethod({name: kind for of_expert in modules for name, kind in zip(of_expert, types, strict=True)})


def methods(spec: ExpertSpec) -> dict[str, LinearMethod | None]:
    return {
        "dense": None,
        "mxfp4": MXFP4,
        "gguf": gguf(spec, "Q4_K", "Q4_K", "Q6_K"),
        "gguf, gate and up apart": gguf(spec, "Q4_K", "Q5_K", "Q8_0"),
    }


@pytest.mark.parametrize("method", methods(ExpertSpec(2, 1, 1, True, (True,))))
@pytest.mark.parametrize("facts", ROUTERS.values(), ids=ROUTERS)
def test_a_layer_is_few_launches_and_waits_for_nothing(launches: Launches, facts: dict[str, Any], method: str) -> None:
    """The router's product and its choice, gate and up, the activation, down and the sum, and the shared expert."""
    spec = replace(ExpertSpec(12, 3, 256, True, (True,)), **facts)
    layer = Experts(spec, 0, 512, "silu", methods(spec)[method], torch.bfloat16, GPU)
    for weight in layer.weights():
        weight.finish_loading()
    assert layer.is_recordable
    for rows in (1, 16, 17, 300):
        launches.names.clear()
        x = torch.empty(rows, 512, dtype=torch.bfloat16, device=GPU)
        with launches:
            assert layer(x).shape == (rows, 512)
        most = 6 + (rows > 16) + (method == "gguf, gate and up apart") * 2
        if spec.shared is not None:
            most += 3 + (spec.shared.gate is not None)
        assert launches.names.total() <= most, launches.names


def test_experts_of_several_forms_are_computed_one_by_one(launches: Launches) -> None:
    """They are no one weight, and no graph can record them."""
    spec = ExpertSpec(12, 3, 256, True, (True,))
    mixed = gguf(spec, "Q4_K", "Q4_K", "Q6_K")
    types = {**mixed.types, spec.expert(0, 5)[2]: "Q8_0"}
    layer = Experts(spec, 0, 512, "silu", GgufMethod(types), torch.bfloat16, GPU)
    assert layer.gate_up.is_stacked and not layer.down.is_stacked and not layer.is_recordable
    assert len(list(layer.gate_up)) == 1 and len(list(layer.down)) == 12


class Cache:
    """Stands for the KV cache, whose launches are ATTENTION."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        return q


@contextmanager
def decode_step(launches: Launches, path: Path, config: dict[str, Any]) -> Iterator[Counter[str]]:
    """What a step of one row launches, without attention and angles."""
    path.write_text(json.dumps(config))
    spec = read_decoder_spec(path)
    model = Decoder(spec, torch.bfloat16, GPU)
    numbers = torch.empty(1, dtype=torch.int64, device=GPU)
    launches.names.clear()
    with launches:
        model.compute_logits(model(numbers, ForwardContext(numbers, numbers, (), Cache())))
    yield launches.names


@pytest.mark.parametrize(("name", "layers", "most"), [("gpt_oss", 24, 700), ("qwen3_moe", 48, 1000)])
def test_launches_of_a_decode_step(launches: Launches, tmp_path: Path, name: str, layers: int, most: int) -> None:
    """gpt-oss-20b in MXFP4 and Qwen3-30B-A3B in bf16."""
    config = PUBLISHED if name == "gpt_oss" else QWEN3_30B
    with decode_step(launches, tmp_path / "config.json", config) as names:
        assert names["_route_kernel"] == layers and names["_weighted_sum_kernel"] == layers
        assert names.total() + ANGLES + ATTENTION * layers <= most
