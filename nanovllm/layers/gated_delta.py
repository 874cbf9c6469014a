"""A layer with the gated delta rule, between the residual stream's norm and its sum. Source: Yang et al., "Gated Delta
Networks: Improving Mamba2 with Delta Rule" (2024); the form is that of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanovllm.data.network import Kept, RecurrentSpec, RecurrentState
from nanovllm.errors import ConfigError
from nanovllm.layers.build_context import BuildContext, Split, held_ranges
from nanovllm.layers.layer_inputs import LayerInputs, row_parts
from nanovllm.layers.linear import ColumnParallelLinear, RowAdapters, RowParallelLinear, Rows
from nanovllm.layers.mixer import MixedRows, Mixer
from nanovllm.layers.module import Parameter
from nanovllm.layers.norm import RMSNorm
from nanovllm.ops.cpu_delta import FewRows
from nanovllm.ops.cpu_kernels import FewRowLayer, HeadLayout
from nanovllm.ops.delta_inputs import DecayWeights, StateRows
from nanovllm.ops.recurrent_kernels import recurrent_kernels_on


class GatedDelta(Mixer):
    """out_proj(norm(delta_rule(conv(q, k, v))) * silu(z)), with b and a for the shares that are written and kept.

    Each rank has some of the key heads with their value heads.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: RecurrentSpec,
        eps: float,
        layer: int,
        build: BuildContext,
        *,
        merged: bool = False,
    ) -> None:
        """spec: of all ranks together; layer: the index among all layers, by which the states are known.

        merged: whether the checkpoint has one matrix for q, k, v and z, and one for b and a, key head by key head.
        """
        self.layer = layer
        self._eps = eps
        self._merged = merged
        self._kernels = recurrent_kernels_on(build.device, build.dtype)
        keys, values = _heads_of_rank(spec, build)
        self.spec = spec = replace(spec, num_key_heads=keys.size, num_value_heads=values.size)
        key_rows = keys.times(spec.key_dim)
        value_rows = values.times(spec.value_dim)
        of_channels = (key_rows, key_rows, value_rows)
        rows: Rows = {"in_proj_qkv": of_channels, "in_proj_z": (value_rows,)}
        rows = {**rows, "in_proj_b": (values,), "in_proj_a": (values,)}
        if merged:
            group = values.size // keys.size
            qkvz = keys.times(2 * (spec.key_dim + group * spec.value_dim))
            rows = {"in_proj_qkvz": (qkvz,), "in_proj_ba": (keys.times(2 * group),)}
        self.input = ColumnParallelLinear(hidden_size, rows, build)
        self.output = RowParallelLinear("out_proj", value_rows, hidden_size, build)
        self._conv = torch.empty(spec.conv_kernel, spec.channels, dtype=build.dtype, device=build.device)
        wide = partial(torch.empty, values.size, dtype=torch.float32, device=build.device)
        self._decay = DecayWeights(rate=wide(), bias=wide())
        self._norm = torch.empty(spec.value_dim, dtype=build.dtype, device=build.device)
        self.parameters = self._parameters(of_channels, values, build)
        self._few_rows = None if merged else FewRows(spec, self._conv, self._decay, self._norm)

    def _parameters(self, of_channels: Sequence[Split], values: Split, build: BuildContext) -> Sequence[Parameter]:
        """What the layer has besides its projections; the arguments are what ranks share of them."""
        prefix = build.prefix
        conv = (sum(split.total for split in of_channels), 1, self.spec.conv_kernel)
        heads = (values.total,)
        of_conv, of_heads = (None if build.group is None else held_ranges(split) for split in (of_channels, (values,)))
        return (
            Parameter(f"{prefix}conv1d.weight", self._conv.T[:, None], conv, held=of_conv),
            Parameter(f"{prefix}dt_bias", self._decay.bias, heads, held=of_heads),
            Parameter(f"{prefix}A_log", self._decay.rate, heads, convert=lambda log: log.float().exp(), held=of_heads),
            Parameter(f"{prefix}norm.weight", self._norm),
        )

    @property
    def kept(self) -> Kept:
        return RecurrentState(self.spec)

    @property
    def head_layout(self) -> HeadLayout:
        """There are no queries, of which the kernels would ask."""
        return HeadLayout(self.spec.value_dim, self.spec.value_dim)

    def mix(
        self, x: Tensor, inputs: LayerInputs, norm: RMSNorm | None, few_rows: FewRowLayer | None
    ) -> Iterator[MixedRows]:
        ctx = inputs.ctx
        assert ctx.states is not None, "a step of a network with recurrent layers brings their states"
        states = ctx.states.of_layer(self.layer)
        parts = zip(ctx.adapters_of_parts, inputs.state_parts, row_parts(inputs.parts, x), strict=False)
        for adapters, (rows, kept), (x_rows,) in parts:
            mixed, projected = self.recur_(x_rows, rows, states, norm, adapters, few_rows)
            if ctx.states.kept is not None and kept is not None:
                ctx.states.kept.of_layer(self.layer).index_copy_(0, kept.target, projected[kept.source])
            yield MixedRows(x_rows, mixed, adapters)

    def recur_(
        self,
        x: Tensor,
        rows: StateRows,
        states: tuple[Tensor, Tensor],
        norm: RMSNorm | None,
        adapters: RowAdapters | None,
        few_rows: FewRowLayer | None,
    ) -> tuple[Tensor, Tensor]:
        """What the output projection reads of rows x, and what the input projection gives; advances their states."""
        if adapters is None and self._few_rows is not None and few_rows is not None and few_rows.takes(x):
            return self._few_rows(few_rows, x, rows, states)
        projected = self.input(x if norm is None else norm(x), adapters)
        return self(projected, rows, states), projected

    def __call__(self, projected: Tensor, rows: StateRows, states: tuple[Tensor, Tensor]) -> Tensor:
        """What the output projection reads, [rows, value_heads * value_dim], of what the input projection gives.

        Advances the states of the rows. states: of the layer, as `StepStates.of_layer` gives them.
        """
        conv, state = states
        mixed, z, b, a = self._split(projected)
        inputs = self._kernels.delta_inputs_(self.spec, rows, mixed, self._conv, conv, b, a, self._decay)
        y = self._kernels.delta_rule_(self.spec, rows, inputs, state)
        return self._kernels.gated_rms_norm(y, z, self._norm, self._eps)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, z, b and a, head after head each, from the order of the checkpoint's modules."""
        spec = self.spec
        heads = self.spec.num_value_heads
        if not self._merged:
            mixed, z, b, a = projected.split((spec.channels, spec.value_size, heads, heads), dim=1)
            return mixed, z, b, a
        group = heads // spec.num_key_heads
        of_values = group * spec.value_dim
        both = projected.split((spec.channels + spec.value_size, 2 * heads), dim=1)
        qkvz, ba = (rows.unflatten(1, (spec.num_key_heads, -1)) for rows in both)
        q, k, v, z = (part.flatten(1) for part in qkvz.split((spec.key_dim, spec.key_dim, of_values, of_values), dim=2))
        b, a = (part.flatten(1).contiguous() for part in ba.split(group, dim=2))
        return torch.cat((q, k, v), dim=1), z, b, a


def _heads_of_rank(spec: RecurrentSpec, build: BuildContext) -> tuple[Split, Split]:
    """The key heads and the value heads of this rank: value heads go with their key head."""
    if spec.num_key_heads % build.num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={build.num_ranks}: the model has {spec.num_key_heads} key heads in a recurrent "
            "layer, which cannot be divided evenly; take another number of ranks"
        )
    keys = build.split(spec.num_key_heads, "key heads")
    return keys, keys.times(spec.num_value_heads // spec.num_key_heads)
