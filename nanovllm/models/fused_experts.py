"""Checkpoints with one tensor for all experts of a layer, as Transformers 5 writes with save_original_format=False."""

from __future__ import annotations

from nanovllm.errors import ModelError
from nanovllm.formats.checkpoint import StoredTensor
from nanovllm.models.spec import DecoderSpec


def with_single_experts(stored: dict[str, StoredTensor], spec: DecoderSpec) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with fused ones as a tensor for each expert's projection.

    Layer N has `model.layers.N.mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden] and `down_proj` [experts,
    hidden, intermediate]; its block is named mlp for every family. Raises ModelError if a fused tensor has another
    shape.
    """
    found, experts = dict(stored), spec.experts
    if experts is None:
        return found
    hidden, inner, count = spec.hidden_size, experts.intermediate_size, experts.num_experts
    for layer in (index for index in range(spec.num_layers) if experts.layers[index]):
        prefix = f"model.layers.{layer}.mlp."
        if f"{prefix}experts.gate_up_proj" not in stored:
            continue
        gate_up, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
        router = f"{prefix}gate.weight"
        gate_up_tensor = _take(found, gate_up, (count, 2 * inner, hidden))
        down_tensor = _take(found, down, (count, hidden, inner))
        if router in found:
            found[f"{experts.router(layer)}.weight"] = part_of(found.pop(router), router, slice(None))
        for expert in range(count):
            modules = experts.expert(layer, expert)
            found[f"{modules[0]}.weight"] = part_of(gate_up_tensor, gate_up, expert, slice(0, inner))
            found[f"{modules[1]}.weight"] = part_of(gate_up_tensor, gate_up, expert, slice(inner, 2 * inner))
            found[f"{modules[2]}.weight"] = part_of(down_tensor, down, expert, slice(None))
    return found


def _take(found: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Remove a fused tensor from those found, and return it."""
    tensor = found.pop(name, None)
    if tensor is None:
        raise ModelError(f"{name} is missing, which holds experts of this layer; copy the checkpoint again.")
    if tensor.shape != shape:
        raise ModelError(
            f"{tensor.file} holds a tensor of a shape its config does not give: {name} expected {list(shape)}, "
            f"found {list(tensor.shape)}."
        )
    return tensor


def part_of(tensor: StoredTensor, name: str, *index: int | slice) -> StoredTensor:
    """A part of a tensor, or all of it, under another name. The first slices of `index` keep whole rows."""
    found = [
        range(*part.indices(size)) if isinstance(part, slice) else part
        for part, size in zip(index, tensor.shape, strict=False)
    ]
    kept = [each for each in found if isinstance(each, range)]
    shape = (*map(len, kept), *tensor.shape[len(index) :])
    return StoredTensor(tensor.file, shape, tensor.dtype, whole=(name, found))
