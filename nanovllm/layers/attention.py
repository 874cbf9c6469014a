"""Attention of a decoder layer, by way of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanovllm.data.network import Kept, KVLayer
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.joint_norms import JointNorms
from nanovllm.layers.layer_inputs import LayerInputs, row_parts
from nanovllm.layers.linear import QKVParallelLinear, RowAdapters, RowParallelLinear
from nanovllm.layers.mixer import MixedRows, Mixer
from nanovllm.layers.module import Parameter
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding, rotated_order
from nanovllm.ops.cpu_kernels import FewRowLayer, HeadLayout
from nanovllm.ops.recurrent_kernels import recurrent_kernels_on
from nanovllm.ops.row_kernels import kernels_on


class Attention(Mixer):
    """q, k, v = rope(norm(qkv(x))); o(attend(q, k, v)). Each rank has some of the heads.

    What varies between families: norms of q and k, over each head or over all heads together, biases, a window, sinks
    (a learned score beside those of the keys, with a value of 0), and gates (the output times the sigmoid of a gate,
    which q_proj has beside each query).
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: RotaryEmbedding,
        build: BuildContext,
        *,
        qk_norm: type[RMSNorm] | None = None,
        joint_qk_norm: bool = False,
        eps: float = 0.0,
        bias: bool = False,
        output_bias: bool | None = None,
        window: int | None = None,
        sinks: bool = False,
        gate: bool = False,
        merged: bool = False,
        scale: float | None = None,
        kv_parts: Sequence[str] = ("k_proj", "v_proj"),
    ) -> None:
        """qk_norm: RMS norms of q and k before RoPE, with `eps`; joint_qk_norm: over all heads of q together, and of k.

        bias: of q, k and v; output_bias: of the output projection, None: as `bias`. window: keys that a query sees, its
        own included; None: all. merged: whether the checkpoint has one matrix for q, k and v. scale: what multiplies
        the product of a query and a key, by default head_dim^-0.5. kv_parts: see `QKVParallelLinear`.
        """
        self._build = build
        self.rope = rope
        self.window = window
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.has_gate = gate
        self.has_keys = bool(kv_parts)
        self.heads, self.kv_heads = build.split_heads(heads, kv_heads)
        self.q_size = self.heads.size * head_dim
        self.kv_size = self.kv_heads.size * head_dim
        self.kv_layer = 0  # the index by which the KV cache knows the layer; `CausalLM` numbers them
        self._eps = eps
        self._kernels = kernels_on(build.device, build.dtype)
        self._sigmoid_gate_ = recurrent_kernels_on(build.device, build.dtype).sigmoid_gate_
        rotary_dim = rope.rope.rotary_dim
        self._rotated = None if rotary_dim is None else rotated_order(rotary_dim, head_dim, build.device)
        self._head_layout = HeadLayout(head_dim, rotary_dim or head_dim, gate)
        self.input = QKVParallelLinear(
            hidden_size, self.heads, self.kv_heads, head_dim, build, bias=bias, gate=gate, kv_parts=kv_parts,
            merged=merged,
        )  # fmt: skip
        output_bias = bias if output_bias is None else output_bias
        self.output = RowParallelLinear("o_proj", self.heads.times(head_dim), hidden_size, build, bias=output_bias)
        self._joint_norms: JointNorms | None = None
        self._qk_weight: Tensor | None = None  # of the norms of q and k, a row for each head
        if qk_norm is not None:
            norms = self._joint_qk_norms if joint_qk_norm else self._head_norms
            self._norms = norms(qk_norm)
        self._sinks = Parameter(
            f"{build.prefix}sinks",
            torch.empty(self.heads.size, dtype=torch.float32, device=build.device),
            (heads,),
            held=None if build.group is None else self.heads.held,
        ) if sinks else None  # fmt: skip

    @property
    def sinks(self) -> Tensor | None:
        """fp32 [heads]."""
        return None if self._sinks is None else self._sinks.data

    @property
    def kept(self) -> Kept:
        most = max(len(kv_heads) for _, kv_heads in self._build.heads_of_ranks(self.heads.total, self.kv_heads.total))
        return KVLayer(self.kv_heads.size, self.head_dim, self.window, most)

    @property
    def has_joint_norms(self) -> bool:
        return self._joint_norms is not None

    @property
    def head_layout(self) -> HeadLayout:
        return self._head_layout

    @property
    def qk_weight(self) -> Tensor | None:
        return self._qk_weight

    def _head_norms(self, norm: type[RMSNorm]) -> list[RMSNorm]:
        """Norms over each head. One weight with a row for each head of q and k, so that one call normalizes both."""
        build = self._build
        sizes = (self.heads.size, self.kv_heads.size) if self.has_keys else (self.heads.size,)
        shape = (sum(sizes), self.head_dim)
        self._qk_weight = torch.empty(shape, dtype=norm.dtype_of(build.dtype), device=build.device)
        # The heads come to their norms in the order of their features for RoPE.
        return [
            norm(self.head_dim, self._eps, build.at(name), data=weight, order=self._rotated)
            for name, weight in zip(("q_norm", "k_norm"), self._qk_weight.split(sizes), strict=False)
        ]

    def _joint_qk_norms(self, norm: type[RMSNorm]) -> list[RMSNorm]:
        """Norms over all heads of q, and over all of k."""
        build = self._build
        sizes = (self.q_size, self.kv_size)
        weight = torch.empty(sum(sizes), dtype=norm.dtype_of(build.dtype), device=build.device)
        self._joint_norms = JointNorms(weight, sizes, self._eps, build.dtype)
        if build.group is not None:
            self._joint_norms.divide(self.heads, self.kv_heads, build.group)
        splits = self.heads.times(self.head_dim), self.kv_heads.times(self.head_dim)
        return [
            norm(split.total, self._eps, build.at(name), data=data, split=None if build.group is None else split)
            for name, split, data in zip(("q_norm", "k_norm"), splits, weight.split(sizes), strict=True)
        ]

    def mix(
        self, x: Tensor, inputs: LayerInputs, norm: RMSNorm | None, few_rows: FewRowLayer | None
    ) -> Iterator[MixedRows]:
        ctx = inputs.ctx
        q, k, v = self._memory(inputs)
        gates = (x.new_empty(x.shape[0], self.q_size),) if self.has_gate else ()
        parts = row_parts(inputs.parts, x, *inputs.angles(self.rope), q, k, v, *gates)
        for adapters, (x_rows, *of_rows) in zip(ctx.adapters_of_parts, parts, strict=False):
            self._project(x_rows, *of_rows, norm=norm, adapters=adapters, few_rows=few_rows)
        scale = inputs.query_scale(self.rope)
        if scale is not None:
            q.mul_(scale)
        attended = ctx.kv_cache.attend(self.kv_layer, q, k, v, ctx).reshape(x.shape[0], self.q_size)
        parts = row_parts(inputs.parts, x, attended, *gates)
        for adapters, (x_rows, attended_rows, *gate) in zip(ctx.adapters_of_parts, parts, strict=False):
            if gate:
                self._sigmoid_gate_(attended_rows, *gate)
            yield MixedRows(x_rows, attended_rows, adapters)

    def _memory(self, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        return inputs.heads(self.heads.size, self.kv_heads.size, self.head_dim)

    def _project(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None = None,
        *,
        norm: RMSNorm | None,
        adapters: RowAdapters | None,
        few_rows: FewRowLayer | None,
    ) -> None:
        """Write q, k and v of the rows of x, normalized if the family does, with RoPE.

        gate: where the gates of the output go [rows, heads * head_dim], if there are any; norm: of the input.
        """
        if few_rows is not None and adapters is None and self._joint_norms is None and few_rows.takes(x):
            few_rows.project(x, cos, sin, q, k, v, gate)
            return
        heads = self._heads_of(x if norm is None else norm(x), gate, adapters)
        self.place_heads(heads, cos, sin, q, k, v)

    def _heads_of(self, x: Tensor, gate: Tensor | None, adapters: RowAdapters | None) -> Tensor:
        """The projection of normalized rows: [rows, heads, head_dim], with its norms over all heads."""
        projected = self.input(x, adapters)
        if gate is not None:
            projected = self._without_gates(projected, gate)
        if self._joint_norms is not None:
            self._joint_norms.normalize_(projected[:, : self.q_size + self.kv_size])
        return projected.unflatten(-1, (-1, self.head_dim))

    @property
    def takes_few_rows(self) -> bool:
        return type(self).place_heads is Attention.place_heads

    def place_heads(self, heads: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Split heads [rows, heads, head_dim] into q, k and v, with norms over each head and RoPE of q and k."""
        if self._rotated is not None:  # an order of features that q and k share does not change their products
            q_and_k = heads[:, : self.heads.size + self.kv_heads.size]
            q_and_k.copy_(q_and_k[..., self._rotated])
        self._kernels.place_heads(heads, self._qk_weight, self._eps, cos, sin, q, k, v)

    def _without_gates(self, projected: Tensor, gate: Tensor) -> Tensor:
        """q, k and v of a projection in which each head's gate follows its query; the gates are written to `gate`."""
        both, k_and_v = projected.split((2 * self.q_size, 2 * self.kv_size), dim=1)
        both = both.unflatten(1, (self.heads.size, 2, self.head_dim))
        gate.unflatten(1, (self.heads.size, self.head_dim)).copy_(both[:, :, 1])
        return torch.cat((both[:, :, 0].flatten(1), k_and_v), dim=1)
