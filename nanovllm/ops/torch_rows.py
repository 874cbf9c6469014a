"""The operations of `row_kernels` in plain torch: for tensors that neither the C++ nor the Triton kernels take."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# of `row_kernels.clamped_swiglu`
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `RowKernels.rms_norm`. Takes any shape; the weight broadcasts against x, for instance one row per head."""
    wide = x.float()
    scaled = wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return scaled.to(weight.dtype).mul_(weight).to(x.dtype)


def add_(x: Tensor, addend: Tensor) -> Tensor:
    return x.add_(addend)


def copy_(target: Tensor, source: Tensor) -> Tensor:
    return target.copy_(source)


def narrow_(target: Tensor, wide: Tensor) -> Tensor:
    return target.copy_(wide)


def add_rms_norm_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def place_heads(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    num_heads = q.shape[1]
    num_kv_heads = k.shape[1]
    to_rotate, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if weight is not None:
        to_rotate = rms_norm(to_rotate, weight, eps)
    rotated = rotate(to_rotate, cos, sin)
    q.copy_(rotated[:, :num_heads])
    k.copy_(rotated[:, num_heads:])
    v.copy_(values)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its angle; the result is fp32, so that the caller rounds once.

    x: [tokens, heads, head_dim]; cos: [tokens, 1, head_dim]; sin: [tokens, 1, head_dim / 2].
    Source: Su et al., "RoFormer" (2021), with pairs half a head apart, the layout of Transformers.
    """
    half = x.shape[-1] // 2
    x = x.float()
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * torch.sigmoid(gate * SWIGLU_ALPHA)).mul_(up + 1.0)


def cos_sin(angles: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    cos = angles.cos() * factor
    return torch.cat((cos, cos), dim=-1), angles.sin() * factor


def softmax(x: Tensor, *, log: bool = False) -> Tensor:
    return torch.log_softmax(x, dim=-1) if log else torch.softmax(x, dim=-1)


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def likeliest(logits: Tensor) -> Tensor:
    # NaN if any logit is NaN. The two calls take less time than aminmax.
    is_finite = logits.amin(dim=-1).isfinite() & logits.amax(dim=-1).isfinite()
    return torch.argmax(logits, dim=-1).masked_fill_(~is_finite, -1)


def draw(scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    return torch.argmax(scores + gumbel_noise(tokens, starts), dim=-1)


def gumbel_noise(tokens: Tensor, starts: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of tokens [width] or [rows, width]: fp64 [rows, width], a function of (start, token).

    Counter-based, so that it is the same in every batch and process: token i takes the i-th number of SplitMix64
    (Steele, Lea and Flood, 2014) from the row's start, as a uniform u of 52 bits (with 53 bits the largest would round
    to 1), and -log(-log(u)) is a Gumbel variable. fp64, because an fp32 uniform takes its smallest value once in 2^24
    draws, which would select tokens of almost no probability.
    """
    numbers = splitmix64(starts.unsqueeze(1) + (tokens + 1) * as_int64(GOLDEN_GAMMA))
    uniform = (_shift(numbers, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def splitmix64(z: Tensor) -> Tensor:
    """SplitMix64's mixing of a 64-bit state. int64 represents the unsigned integers: products wrap alike."""
    z = (z ^ _shift(z, 30)) * as_int64(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * as_int64(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Unsigned right shift: the shift of int64 would copy the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def as_int64(number: int) -> int:
    """The int64 with the low 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    if (slots < 0).any():
        kept = slots >= 0
        k = k[kept]
        v = v[kept]
        slots = slots[kept]
    blocks = slots // pool.shape[3]
    offsets = slots % pool.shape[3]
    pool[blocks, 0, :, offsets] = k
    pool[blocks, 1, :, offsets] = v
