"""The operations of `recurrent_kernels` in C++.

A row's bits depend on its sequence's tokens alone: not on where a step began, on other rows, on threads, nor on the
instruction set. All functions raise ValueError for tensors that they do not support or that do not fit each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.ops import _cpu_kernels
from nanovllm.ops.cpu_kernels import KERNEL_DTYPES, FewRowLayer, address, misfit, takes
from nanovllm.ops.delta_inputs import DecayWeights, DeltaInputs, StateRows


def delta_inputs_(
    spec: RecurrentSpec,
    rows: StateRows,
    x: Tensor,
    weight: Tensor,
    conv: Tensor,
    b: Tensor,
    a: Tensor,
    decay: DecayWeights,
) -> DeltaInputs:
    count = x.shape[0]
    heads = spec.num_value_heads
    dtype = x.dtype
    kernel_fits = weight.shape == (spec.conv_kernel, spec.channels) and conv.shape[1:] == spec.conv_shape
    fits = kernel_fits and takes(x, 2) and x.shape[1] == spec.channels and b.shape == a.shape == (count, heads)
    fits = fits and takes(a, 2) and takes(b, 2) and dtype == weight.dtype == conv.dtype == a.dtype == b.dtype
    fits = fits and weight.is_contiguous() and _slots_are_dense(conv)
    if not fits or not all(_is_vector(weights, heads) for weights in decay):
        rule = (
            "delta_inputs_ takes x [rows, channels], b and a [rows, value heads], weight [kernel, channels] and conv "
            "[slots, channels, kernel - 1] of one dtype, and fp32 weights of the decay [value heads], dense, on the CPU"
        )
        raise misfit(rule, x=x, weight=weight, conv=conv, b=b, a=a, rate=decay.rate, bias=decay.bias)
    inputs = DeltaInputs.empty_for(spec, x)
    _cpu_kernels.delta_prepare(
        dtype=KERNEL_DTYPES[dtype], sizes=_sizes(spec), runs=_runs(rows, count, conv), x=address(x),
        weight=weight.data_ptr(), conv=address(conv), b=address(b), a=address(a), rate=decay.rate.data_ptr(),
        dt_bias=decay.bias.data_ptr(), qk=inputs.qk.data_ptr(), v=inputs.v.data_ptr(), decay=inputs.decay.data_ptr(),
        beta=inputs.beta.data_ptr(), threads=torch.get_num_threads(),
    )  # fmt: skip
    return inputs


def delta_rule_(spec: RecurrentSpec, rows: StateRows, inputs: DeltaInputs, states: Tensor) -> Tensor:
    (qk, v, decay, beta, _) = inputs
    count = len(inputs.v)
    heads = (count, spec.num_value_heads)
    fits = qk.shape == (count, 2, spec.num_key_heads, spec.key_dim) and v.shape == (*heads, spec.value_dim)
    fits = fits and decay.shape == beta.shape == heads and states.shape[1:] == spec.state_shape
    fits = fits and all(x.dtype == torch.float32 for x in (qk, decay, beta, states)) and v.dtype in KERNEL_DTYPES
    fits = fits and all(x.is_cpu and x.is_contiguous() for x in inputs[:4]) and _slots_are_dense(states)
    if not fits:
        raise misfit(
            "delta_rule_ takes DeltaInputs and fp32 states [slots, value heads, key dim, value dim], dense, on the CPU",
            qk=qk, v=v, decay=decay, beta=beta, states=states,
        )  # fmt: skip
    y = v.new_empty(count, spec.value_size)
    _cpu_kernels.delta_recur(
        dtype=KERNEL_DTYPES[v.dtype], sizes=_sizes(spec), runs=_runs(rows, count, states), qk=qk.data_ptr(),
        v=v.data_ptr(), decay=decay.data_ptr(), beta=beta.data_ptr(), states=address(states), y=y.data_ptr(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    (count, width) = x.shape
    size = weight.numel()
    fits = takes(x, 2) and takes(z, 2) and x.shape == z.shape and size > 0 and width % size == 0
    if not (fits and weight.is_cpu and weight.shape == (size,) and x.dtype == z.dtype == weight.dtype):
        raise misfit("gated_rms_norm takes x and z [rows, heads * size], and weight [size]", x=x, z=z, weight=weight)
    weight = weight.contiguous()
    y = x.new_empty(count, width)
    _cpu_kernels.gated_norm(
        dtype=KERNEL_DTYPES[x.dtype], x=address(x), z=address(z), weight=weight.data_ptr(), y=address(y),
        rows=count, heads=width // size, size=size, eps=eps, threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def sigmoid_gate_(x: Tensor, gate: Tensor) -> Tensor:
    if not (takes(x, 2) and takes(gate, 2) and x.shape == gate.shape and x.dtype == gate.dtype):
        raise misfit("sigmoid_gate_ takes x and gate [rows, size] of one dtype on the CPU", x=x, gate=gate)
    _cpu_kernels.gate(
        dtype=KERNEL_DTYPES[x.dtype], x=address(x), gate=address(gate), rows=x.shape[0], size=x.shape[1],
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return x


class FewRows:
    """A recurrent layer up to its output projection for few rows: one call instead of five for the single operators.

    The kernels and their order are those of `rms_norm`, the input projection and the functions above, and so are the
    bits. Keeps references to the tensors, which may be filled later.
    """

    def __init__(self, spec: RecurrentSpec, conv: Tensor, decay: DecayWeights, norm: Tensor) -> None:
        """conv: [conv_kernel, channels] and norm: [value_dim], dense, in the dtype of the layer.

        The input projection must give q, k, v, z, b and a side by side, not merged by key heads.
        """
        self._spec = spec
        self._tensors = (conv, decay, norm)
        self._weights = _cpu_kernels.DeltaWeights(
            sizes=_sizes(spec), conv=conv.data_ptr(), rate=decay.rate.data_ptr(), dt_bias=decay.bias.data_ptr(),
            norm=norm.data_ptr(),
        )  # fmt: skip

    def __call__(
        self, layer: FewRowLayer, x: Tensor, rows: StateRows, states: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer up to its output projection for rows x [rows, hidden] of the residual stream.

        Returns what the output projection reads, [rows, value_heads * value_dim], and what the input projection gave.
        layer: has the input norm and the projections, and takes x; states: as `delta_inputs_` and `delta_rule_` take
        them.
        """
        (conv, state) = states
        spec = self._spec
        dtype = self._tensors[0].dtype
        fits = conv.shape[1:] == spec.conv_shape and state.shape[1:] == spec.state_shape and len(conv) == len(state)
        fits = fits and conv.dtype == x.dtype == dtype and state.dtype == torch.float32
        if not (fits and _slots_are_dense(conv) and _slots_are_dense(state)):
            rule = "few rows take conv states in the dtype of the layer and fp32 recurrent ones, dense, on the CPU"
            raise misfit(rule, x=x, conv=conv, states=state)
        projected, y = (x.new_empty(x.shape[0], width) for width in (spec.projected_size, spec.value_size))
        layer.recur(self._weights, _runs(rows, x.shape[0], state), x, conv, state, projected, y)
        return y, projected


def _sizes(spec: RecurrentSpec) -> _cpu_kernels.DeltaSizes:
    return _cpu_kernels.DeltaSizes(
        key_heads=spec.num_key_heads, value_heads=spec.num_value_heads, key_dim=spec.key_dim, value_dim=spec.value_dim,
        kernel=spec.conv_kernel,
    )  # fmt: skip


def _runs(rows: StateRows, count: int, states: Tensor) -> _cpu_kernels.DeltaRuns:
    """The runs of so many rows, as long as their tensors live."""
    slots, starts, of_row = rows[:3]
    fits = starts.shape == (len(slots) + 1,) and of_row.shape == (count,)
    if not fits or any(row.dtype != torch.int64 or not row.is_cpu or not row.is_contiguous() for row in rows[:3]):
        raise misfit("the runs of these rows are int64 on the CPU", slots=slots, starts=starts, run_of_row=of_row)
    return _cpu_kernels.DeltaRuns(
        slots=slots.data_ptr(), starts=starts.data_ptr(), of_row=of_row.data_ptr(), count=len(slots), rows=count,
        num_slots=len(states),
    )  # fmt: skip


def _slots_are_dense(states: Tensor) -> bool:
    return states.is_cpu and (not len(states) or states[0].is_contiguous())


def _is_vector(x: Tensor, size: int) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and x.shape == (size,) and x.is_contiguous()
