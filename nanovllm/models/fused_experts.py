"""Checkpoints with one tensor for a projection of all experts of a layer, read as a tensor for each expert."""

from __future__ import annotations

from nanovllm.errors import ModelError
from nanovllm.formats.checkpoint import StoredTensor, part_of
from nanovllm.layers.experts import Experts

_SUFFIXES = ("", "_bias", "_blocks", "_scales")  # of a projection's tensors: in plain numbers, bias, two of MXFP4


def split_experts(stored: dict[str, StoredTensor], experts: Experts) -> None:
    """Replace the fused tensors of a layer by a tensor for each expert's projection.

    `gate_up_proj` is [experts, 2 * intermediate, hidden] and `down_proj` [experts, hidden, intermediate]. Raises
    ModelError if a fused tensor has another shape.
    """
    prefix = experts.fused_prefix
    gate_up = f"{prefix}experts.gate_up_proj"
    down = f"{prefix}experts.down_proj"
    if gate_up not in stored:
        return
    hidden = experts.hidden_size
    inner = experts.intermediate_size
    count = experts.spec.num_experts
    gate_up_tensor = _take(stored, gate_up, (count, 2 * inner, hidden))
    down_tensor = _take(stored, down, (count, hidden, inner))
    for name in experts.routing_tensors():
        other = name.replace(experts.prefix, prefix, 1)
        if other in stored:
            stored[name] = part_of(stored.pop(other), other, slice(None))
    for expert, modules in enumerate(experts.names):
        stored[f"{modules[0]}.weight"] = part_of(gate_up_tensor, gate_up, expert, slice(0, inner))
        stored[f"{modules[1]}.weight"] = part_of(gate_up_tensor, gate_up, expert, slice(inner, 2 * inner))
        stored[f"{modules[2]}.weight"] = part_of(down_tensor, down, expert, slice(None))


def split_interleaved_experts(stored: dict[str, StoredTensor], experts: Experts) -> None:
    """The same of gpt-oss, where gate and up alternate.

    `gate_up_proj` is [experts, hidden, 2 * intermediate] and `down_proj` [experts, intermediate, hidden], which
    multiply from the right; `_bias` [experts, outputs]; or in the place of plain numbers `_blocks` and `_scales`
    [experts, outputs, ...]. Output 2i of gate_up_proj is output i of gate, the next one that of up.
    """
    inner = experts.intermediate_size
    hidden = experts.hidden_size
    every = slice(None)
    projections = {
        "gate_up_proj": (hidden, 2 * inner, (slice(0, 2 * inner, 2), slice(1, 2 * inner, 2))),
        "down_proj": (inner, hidden, (every,)),
    }
    for projection, (inputs, outputs, parts) in projections.items():
        for suffix in _SUFFIXES:
            name = f"{experts.prefix}experts.{projection}{suffix}"
            tensor = stored.pop(name, None)
            if tensor is None:
                continue
            _check_shape(name, tensor, (experts.spec.num_experts, *([outputs] if suffix else [inputs, outputs])))
            for expert, (gate, up, down) in enumerate(experts.names):
                own = (gate, up) if projection == "gate_up_proj" else (down,)
                for module, rows in zip(own, parts, strict=True):
                    index = (expert, rows) if suffix else (expert, every, rows)
                    single = part_of(tensor, name, *index, transposed=not suffix)
                    stored[f"{module}.{suffix.removeprefix('_') or 'weight'}"] = single


def _take(stored: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Remove a fused tensor from those stored, and return it."""
    tensor = stored.pop(name, None)
    if tensor is None:
        raise ModelError(f"{name} is missing, which holds experts of this layer; copy the checkpoint again.")
    if tensor.shape != shape:
        raise ModelError(
            f"{tensor.file} holds a tensor of a shape its config does not give: {name} expected {list(shape)}, "
            f"found {list(tensor.shape)}."
        )
    return tensor


def _check_shape(name: str, tensor: StoredTensor, first: tuple[int, ...]) -> None:
    """Raise ModelError unless the tensor has these first axes."""
    if tensor.shape[: len(first)] != first:
        raise ModelError(
            f"{tensor.file} holds a tensor of a shape its config does not give: {name} expected {list(first)} as its "
            f"first axes, found {list(tensor.shape)}."
        )
