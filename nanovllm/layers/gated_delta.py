"""A layer with the gated delta rule, between the residual stream's norm and its sum. Source: Yang et al., "Gated Delta
Networks: Improving Mamba2 with Delta Rule" (2024); the form is that of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.linear import Linear
from nanovllm.layers.linear_method import LinearMethod, NamedSlots, WeightSlot, slot_of
from nanovllm.ops.cpu_delta import FewRows
from nanovllm.ops.delta_inputs import DecayWeights, StateRows
from nanovllm.ops.recurrent_kernels import recurrent_kernels_on
from nanovllm.ops.upload import upload


class KeptRows(NamedTuple):
    """Rows of a part of a step whose input projections are kept: int64 [rows] each, on the device."""

    source: Tensor  # in the part
    target: Tensor  # in the memory of `KeptInputs`


class StatePart(NamedTuple):
    """What rows of a part of a step have to do with states."""

    rows: StateRows
    kept: KeptRows | None


def parts_of_states(ctx: ForwardContext, chunk: int) -> Sequence[StatePart]:
    """Each part of `chunk` rows of a step, all rows being of sequences that follow each other."""
    assert ctx.states is not None, "a step of a network with recurrent layers brings their states"
    slots, device = ctx.states.slots, ctx.states.slots.device
    total = sum(seq.query_len for seq in ctx.sequences)
    parts = ((begin, min(begin + chunk, total)) for begin in range(0, total, chunk))
    return [StatePart(_runs(ctx, *part, slots), _kept_rows(ctx, *part, device)) for part in parts]


def runs_of_rows(lengths: Sequence[int], slots: Tensor) -> StateRows:
    """Runs of so many rows, one after the other."""
    starts = torch.tensor([*accumulate(lengths, initial=0)])
    run_of_row = torch.repeat_interleave(starts.diff())
    return StateRows(slots, upload(starts, slots.device), upload(run_of_row, slots.device))


def _runs(ctx: ForwardContext, begin: int, end: int, slots: Tensor) -> StateRows:
    """The runs of rows [begin, end)."""
    ends = [(index, seq.query_start + seq.query_len) for index, seq in enumerate(ctx.sequences)]
    first = next(index for index, stop in ends if stop > begin)
    last = next(index for index, stop in ends if stop >= end)
    starts = [max(seq.query_start, begin) for seq in ctx.sequences[first : last + 1]] + [end]
    return runs_of_rows([stop - start for start, stop in pairwise(starts)], slots[first : last + 1])


def _kept_rows(ctx: ForwardContext, begin: int, end: int, device: torch.device) -> KeptRows | None:
    """Those of rows [begin, end)."""
    if ctx.states is None or ctx.states.kept is None:
        return None
    source, target = list[int](), list[int]()
    for seq, places in zip(ctx.sequences, ctx.states.kept.rows, strict=True):
        for row, place in enumerate(places, seq.query_start):
            if begin <= row < end:
                source.append(row - begin)
                target.append(place)
    return KeptRows(*(upload(torch.tensor(each), device) for each in (source, target))) if source else None


class GatedDelta:
    """out(norm(delta_rule(conv(q, k, v))) * silu(z)), with b and a for the shares that are written and kept.

    Parameters are allocated and not initialized.
    """

    def __init__(
        self,
        spec: RecurrentSpec,
        hidden_size: int,
        prefix: str,
        eps: float,
        method: LinearMethod | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """prefix: of the names of its modules in the checkpoint; method: how its matrices are stored."""
        self.spec = spec
        self._prefix = prefix
        self._eps = eps
        self._kernels = recurrent_kernels_on(device, dtype)
        linear = partial(Linear, prefix=prefix, bias=False, method=method, dtype=dtype, device=device)
        self.input = linear(hidden_size, spec.input_parts)
        self.out = linear(spec.value_size, {"out_proj": hidden_size})
        self.conv = torch.empty(spec.conv_kernel, spec.channels, dtype=dtype, device=device)
        wide = partial(torch.empty, spec.num_value_heads, dtype=torch.float32, device=device)
        self.decay = DecayWeights(rate=wide(), bias=wide())
        self.norm = torch.empty(spec.value_dim, dtype=dtype, device=device)
        self.few_rows = None if spec.merged_projections else FewRows(spec, self.conv, self.decay, self.norm)

    def __call__(self, projected: Tensor, rows: StateRows, states: tuple[Tensor, Tensor]) -> Tensor:
        """What `out` projects, [rows, value_heads * value_dim], of what `input` gives. Advances the states of the rows.

        states: of the layer, as `StepStates.of_layer` gives them.
        """
        conv, state = states
        mixed, z, b, a = self._split(projected)
        inputs = self._kernels.delta_inputs_(self.spec, rows, mixed, self.conv, conv, b, a, self.decay)
        y = self._kernels.delta_rule_(self.spec, rows, inputs, state)
        return self._kernels.gated_rms_norm(y, z, self.norm, self._eps)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, z, b and a, head after head each, from the order of the checkpoint's modules."""
        spec, heads = self.spec, self.spec.num_value_heads
        if not spec.merged_projections:
            mixed, z, b, a = projected.split((spec.channels, spec.value_size, heads, heads), dim=1)
            return mixed, z, b, a
        group = heads // spec.num_key_heads
        of_values = group * spec.value_dim
        both = projected.split((spec.channels + spec.value_size, 2 * heads), dim=1)
        qkvz, ba = (each.unflatten(1, (spec.num_key_heads, -1)) for each in both)
        q, k, v, z = (each.flatten(1) for each in qkvz.split((spec.key_dim, spec.key_dim, of_values, of_values), dim=2))
        b, a = (each.flatten(1).contiguous() for each in ba.split(group, dim=2))
        return torch.cat((q, k, v), dim=1), z, b, a

    def slots(self) -> NamedSlots:
        """The slots of what it has besides its projections."""
        prefix, heads = self._prefix, (self.spec.num_value_heads,)
        shape = (self.spec.channels, 1, self.spec.conv_kernel)
        yield f"{prefix}conv1d.weight", WeightSlot(self.conv.T[:, None], shape)
        yield f"{prefix}dt_bias", slot_of(self.decay.bias)
        yield f"{prefix}A_log", WeightSlot(self.decay.rate, heads, lambda weight: weight.float().exp())
        yield f"{prefix}norm.weight", slot_of(self.norm)
