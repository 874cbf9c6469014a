"""A decoder layer: what mixes tokens, an MLP or experts, norms, and the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.experts import Experts
from nanovllm.layers.layer_inputs import LayerInputs
from nanovllm.layers.linear import Linear, RowAdapters
from nanovllm.layers.mixer import Mixer
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.module import Module, Parameter
from nanovllm.layers.norm import RMSNorm
from nanovllm.ops.cpu_kernels import FewRowLayer, LayerNorms, few_row_layer
from nanovllm.ops.row_kernels import kernels_on


class DecoderLayer(Module):
    """x += after_mixer(mixer(before_mixer(x))); x += after_mlp(mlp(before_mlp(x))), with the norms that there are.

    A model file makes a mixer, an MLP or experts, and the norms under their names in the checkpoint.
    """

    def __init__(
        self,
        mixer: Mixer,
        mlp: GatedMLP | Experts,
        build: BuildContext,
        *,
        before_mixer: RMSNorm | None = None,
        after_mixer: RMSNorm | None = None,
        before_mlp: RMSNorm | None = None,
        after_mlp: RMSNorm | None = None,
    ) -> None:
        self.before_mixer = before_mixer
        self.mixer = mixer
        self.after_mixer = after_mixer
        self.before_mlp = before_mlp
        self.mlp = mlp
        self.after_mlp = after_mlp
        self._build = build
        self._group = build.group
        self._kernels = kernels_on(build.device, build.dtype)
        self._few_rows = self._few_row_kernels()
        if build.layer_built is not None:
            build.layer_built(self)

    def forward_(self, x: Tensor, inputs: LayerInputs) -> None:
        """Advance the residual stream x [tokens, hidden] in place, row-wise work in the parts of `inputs`."""
        for x_rows, mixed, adapters in self.mixer.mix(x, inputs, self.before_mixer, self._few_rows):
            self._finish_(x_rows, mixed, adapters)

    def _finish_(self, x: Tensor, mixed: Tensor, adapters: RowAdapters | None) -> None:
        """Add the output projection of what was mixed, then the MLP, to rows x of the residual stream, in place."""
        if self._group is None and adapters is None and self._few_rows is not None and self._few_rows.takes(x):
            self._few_rows.finish_(x, mixed)
            return
        mixed = self._summed(self.mixer.output(mixed, adapters))
        if self.after_mixer is not None:
            mixed = self.after_mixer(mixed)
        if self.before_mlp is None:
            normed = self._kernels.add_(x, mixed)
        else:
            normed = self._kernels.add_rms_norm_(x, mixed, self.before_mlp.data, self.before_mlp.eps)
        output = self._mlp_output(x, normed, adapters)
        self._kernels.add_(x, output if self.after_mlp is None else self.after_mlp(output))

    def _mlp_output(self, x: Tensor, normed: Tensor, adapters: RowAdapters | None) -> Tensor:
        """What the MLP makes of rows x of the residual stream; normed: the same with the norm before the MLP."""
        return self._summed(self.mlp(normed, adapters))

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks, each of which has multiplied with its columns of o or down."""
        return x if self._group is None else self._group.all_reduce(x)

    def _few_row_kernels(self) -> FewRowLayer | None:
        """The kernels of the whole layer for few rows, if they give what it gives: they call none of its methods."""
        if type(self)._mlp_output is not DecoderLayer._mlp_output or not self.mixer.takes_few_rows:
            return None
        if not isinstance(self.mlp, GatedMLP) or self.before_mixer is None or self.before_mlp is None:
            return None
        after_mixer = None if self.after_mixer is None else self.after_mixer.data
        after_mlp = None if self.after_mlp is None else self.after_mlp.data
        before = self.before_mixer.data, self.mixer.qk_weight, self.before_mlp.data
        norms = LayerNorms(*before, after_mixer, after_mlp, self.before_mixer.eps)
        products = [(linear.weight.kernel_parts(), linear.bias) for linear in self.linears]
        return few_row_layer(norms, products, self._build.dtype, self.mixer.head_layout, self.mlp.activation)

    def finish_loading(self) -> None:
        super().finish_loading()
        self.weights_moved()

    def weights_moved(self) -> None:
        self._few_rows = self._few_row_kernels()

    def use_torch_products(self) -> None:
        super().use_torch_products()
        self.weights_moved()

    @property
    def stored_bytes(self) -> int:
        """What `weight_tensors` take, as `LinearMethod.weight_bytes` counts it."""
        return sum(own.own_matrix_weights().nbytes for own in self.modules() if not isinstance(own, Parameter))

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can record the layer: the host need not know its numbers."""
        return not isinstance(self.mlp, Experts) or self.mlp.is_recordable

    @property
    def linears(self) -> Sequence[Linear]:
        """Those that adapters may add to: without the router and the experts that it chooses."""
        mlp = self.mlp.shared if isinstance(self.mlp, Experts) else self.mlp
        mixing = (self.mixer.input, self.mixer.output)
        return mixing if mlp is None else (*mixing, mlp.gate_up, mlp.down)
