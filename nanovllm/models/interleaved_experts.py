"""Checkpoints with one tensor for a projection of all experts, in which gate and up alternate: those of gpt-oss."""

from __future__ import annotations

from nanovllm.data.network import ExpertSpec
from nanovllm.errors import ModelError
from nanovllm.formats.checkpoint import StoredTensor, part_of
from nanovllm.models.spec import DecoderSpec

_SUFFIXES = ("", "_bias", "_blocks", "_scales")  # of a projection's tensors: in plain numbers, bias, two of MXFP4


def with_single_interleaved(
    stored: dict[str, StoredTensor], spec: DecoderSpec, experts: ExpertSpec
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with fused ones as a tensor for each expert's projection.

    Layer N has `model.layers.N.mlp.experts.gate_up_proj` [experts, hidden, 2 * intermediate] and `down_proj` [experts,
    intermediate, hidden], which multiply from the right; `_bias` [experts, outputs]; or in the place of plain numbers
    `_blocks` and `_scales` [experts, outputs, ...]. Output 2i of gate_up_proj is output i of gate, the next one that of
    up. Raises ModelError if a fused tensor has another shape.
    """
    tensors = dict(stored)
    inner = experts.intermediate_size
    hidden = spec.hidden_size
    every = slice(None)
    projections = {
        "gate_up_proj": (hidden, 2 * inner, (slice(0, 2 * inner, 2), slice(1, 2 * inner, 2))),
        "down_proj": (inner, hidden, (every,)),
    }
    for layer in (index for index in range(spec.num_layers) if experts.layers[index]):
        modules = [experts.expert(layer, index) for index in range(experts.num_experts)]
        for projection, (inputs, outputs, parts) in projections.items():
            for suffix in _SUFFIXES:
                name = f"model.layers.{layer}.{experts.block}.experts.{projection}{suffix}"
                tensor = tensors.pop(name, None)
                if tensor is None:
                    continue
                _check_shape(name, tensor, (experts.num_experts, *([outputs] if suffix else [inputs, outputs])))
                for expert, (gate, up, down) in enumerate(modules):
                    own = (gate, up) if projection == "gate_up_proj" else (down,)
                    for module, rows in zip(own, parts, strict=True):
                        index = (expert, rows) if suffix else (expert, every, rows)
                        single = part_of(tensor, name, *index, transposed=not suffix)
                        tensors[f"{module}.{suffix.removeprefix('_') or 'weight'}"] = single
    return tensors


def _check_shape(name: str, tensor: StoredTensor, first: tuple[int, ...]) -> None:
    """Raise ModelError unless the tensor has these first axes."""
    if tensor.shape[: len(first)] != first:
        raise ModelError(
            f"{tensor.file} holds a tensor of a shape its config does not give: {name} expected {list(first)} as its "
            f"first axes, found {list(tensor.shape)}."
        )
