"""The gated MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.linear import ColumnParallelLinear, RowAdapters, RowParallelLinear
from nanovllm.layers.module import Module
from nanovllm.ops.row_kernels import GATED_UNITS


class GatedMLP(Module):
    """down(activation(gate(x)) * up(x)). Gate and up are one product, and each rank has some of the inner features."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        build: BuildContext,
        *,
        bias: bool = False,
        merged: bool = False,
        what: str = "intermediate",
    ) -> None:
        """activation: one of GATED_UNITS; merged: whether the checkpoint has one matrix for gate and up.

        what: the name of the inner features in messages.
        """
        self.activation = activation
        self._gated_unit = GATED_UNITS[activation]
        names = ("gate_up_proj",) if merged else ("gate_proj", "up_proj")
        widths = 2 // len(names)
        units = [build.units(name, widths * intermediate_size, hidden_size)[0] for name in names]
        units.append(build.units("down_proj", hidden_size, intermediate_size)[1])
        inner = build.split(intermediate_size, what, units)
        self.gate_up = ColumnParallelLinear(hidden_size, dict.fromkeys(names, (inner,) * widths), build, bias=bias)
        self.down = RowParallelLinear("down_proj", inner, hidden_size, build, bias=bias)

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """[rows, hidden] -> [rows, hidden], of several ranks this one's part of the sum."""
        return self.down(self._gated_unit(self.gate_up(x, adapters)), adapters)
