"""The operations of `recurrent_kernels` in plain torch, token by token: for tensors that no other kernels take.

On the meta device they make what the other kernels would, and compute nothing.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.data.network import RecurrentSpec
from nanovllm.ops.delta_inputs import DecayWeights, DeltaInputs, StateRows
from nanovllm.ops.torch_rows import rms_norm

NORM_EPS = 1e-6  # of the norms of q and k


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
    if x.is_meta:
        return DeltaInputs.empty_for(spec, x)
    mixed = F.silu(_convolved_(rows, x, weight, conv)).to(x.dtype)
    q, k, v = mixed.split((spec.key_size, spec.key_size, spec.value_size), dim=-1)
    q, k = (_normed(x.unflatten(-1, (spec.num_key_heads, spec.key_dim))) for x in (q, k))
    rate = -decay.rate * F.softplus(a.float() + decay.bias)
    v = v.unflatten(-1, (spec.num_value_heads, spec.value_dim))
    return DeltaInputs(torch.stack((q * spec.key_dim**-0.5, k), dim=1), v, rate.exp(), b.sigmoid().float())


def _convolved_(rows: StateRows, x: Tensor, weight: Tensor, conv: Tensor) -> Tensor:
    """The causal convolution in fp32, [rows, channels]."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    kept = conv.shape[2]
    for slot, (begin, end) in _runs(rows):
        seen = torch.cat((conv[slot].T, x[begin:end]))
        taps = seen.float().unfold(0, kept + 1, 1)  # [rows of the run, channels, kernel]
        y[begin:end] = (taps * weight.float().T).sum(-1)
        conv[slot] = seen[len(seen) - kept :].T
    return y


def _normed(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def delta_rule_(spec: RecurrentSpec, rows: StateRows, inputs: DeltaInputs, states: Tensor) -> Tensor:
    qk, v, decay, beta, _ = inputs
    y = torch.empty_like(v)
    if v.is_meta:
        return y.flatten(1)
    group = spec.num_value_heads // spec.num_key_heads
    for slot, (begin, end) in _runs(rows):
        state = states[slot]
        for row in range(begin, end):
            q, k = qk[row].repeat_interleave(group, dim=1)
            state = state * decay[row, :, None, None]
            delta = (v[row] - torch.einsum("hkv,hk->hv", state, k)) * beta[row, :, None]
            state = state + k[:, :, None] * delta[:, None, :]
            y[row] = torch.einsum("hkv,hk->hv", state, q)
        states[slot] = state
    return y.flatten(1)


def _runs(rows: StateRows) -> list[tuple[int, tuple[int, int]]]:
    """The slot and the rows of each run."""
    return list(zip(rows.slots.tolist(), pairwise(rows.starts.tolist()), strict=True))


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_meta:
        return x.new_empty(x.shape)
    heads = (x.shape[1] // len(weight), len(weight))
    normed = rms_norm(x.unflatten(1, heads), weight, eps)
    return (normed * F.silu(z.unflatten(1, heads).float())).to(x.dtype).flatten(1)


def sigmoid_gate_(x: Tensor, gate: Tensor) -> Tensor:
    return x if x.is_meta else x.mul_(gate.sigmoid())
