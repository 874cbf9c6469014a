"""The head for multi-token prediction that Qwen3-Next and Qwen3.5 have beside their layers, as plain data."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.layers.linear_method import CheckpointTensor, NamedTensors, dense_tensors
from nanovllm.models.families import FAMILIES, MTP
from nanovllm.models.spec import WIDE_BYTES, DecoderSpec

INPUT_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")  # of what `fc` reads, in its order


def has_mtp_head(spec: DecoderSpec) -> bool:
    """Whether checkpoints of the family may have the head."""
    return MTP in FAMILIES[spec.architecture].left_out


def mtp_spec(spec: DecoderSpec) -> DecoderSpec:
    """The head of a network as a network of one layer with attention. Embedding and output projection are shared."""
    root = MTP.removesuffix(".")
    experts = None if spec.experts is None else replace(spec.experts, layers=(True,), root=root)
    return replace(spec, num_layers=1, sliding_windows=(None,), experts=experts, recurrent=None, root=root)


def mtp_tensors(spec: DecoderSpec) -> NamedTensors:
    """Name and form of every checkpoint tensor of a head. spec: of `mtp_spec`."""
    fc = fc_matrix(spec)
    yield from dense_tensors(*fc) if spec.quantization is None else spec.quantization.tensors(*fc)
    yield from (tensor for tensor in spec.tensors() if tensor[0].startswith(MTP))
    for name in INPUT_NORMS:
        yield f"{MTP}{name}.weight", CheckpointTensor((spec.hidden_size,))


def fc_matrix(spec: DecoderSpec) -> tuple[str, int, int]:
    """Module, output and input features of what makes one row of an embedding and a hidden state."""
    return f"{MTP}fc", spec.hidden_size, 2 * spec.hidden_size


def mtp_weight_bytes(spec: DecoderSpec, itemsize: int) -> int:
    """Bytes of a head's own weights, where an element of the dtype takes `itemsize`. spec: of `mtp_spec`."""
    fc = fc_matrix(spec)
    method = spec.quantization
    matrix = fc[1] * fc[2] * itemsize if method is None else method.weight_bytes(*fc, itemsize)
    norms = (1 + len(INPUT_NORMS)) * spec.hidden_size * (WIDE_BYTES if spec.norms_in_fp32 else itemsize)
    return spec.layer_weight_bytes(itemsize) + matrix + norms
