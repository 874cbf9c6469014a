"""Rotary position embedding: angles for the positions of one batch, never a table over all positions.

Frequencies are those of Transformers' rope kinds, computed with the same fp32 operations in the same order:
at position 100,000 one rounding of a frequency turns an angle by 0.01 rad, so an equal formula is not enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.layers.rope_spec import RopeSpec
from nanovllm.ops.row_kernels import cos_sin, powers


class RotaryEmbedding:
    """cos and sin for the tokens of a batch, from their positions alone (and, for dynamic, their lengths)."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.rope = rope
        self.head_dim = head_dim
        # Made on the CPU whatever the device is: pow rounds differently elsewhere.
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._exponents = _exponents(head_dim).double().to(device)

    def cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """cos [tokens, 1, head_dim] and sin [tokens, 1, head_dim / 2], fp32.

        positions, lengths: int64 [tokens]; a token's length is the sequence length dynamic RoPE scales by.
        """
        angles = positions.float()[:, None] * self._frequencies(lengths)
        cos, sin = cos_sin(angles, self.rope.attention_factor)
        return cos[:, None, :], sin[:, None, :]

    def _frequencies(self, lengths: Tensor) -> Tensor:
        """[head_dim / 2], or [tokens, head_dim / 2] where each token has its own."""
        if self.rope.kind != "dynamic":
            return self.inv_freq
        grown = dynamic_frequencies(self.rope, self._exponents, lengths)
        return torch.where((lengths > self.rope.original_max_position)[:, None], grown, self.inv_freq)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]; for dynamic, those up to the trained length."""
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, head_dim)
    inv_freq = 1.0 / (rope.theta ** _exponents(head_dim))
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inv_freq)
    return inv_freq


def dynamic_frequencies(rope: RopeSpec, exponents: Tensor, lengths: Tensor) -> Tensor:
    """Dynamic NTK frequencies at sequence lengths int64 [tokens]: fp32 [tokens, head_dim / 2].

    exponents: fp64 [head_dim / 2], those of `inverse_frequencies`, where the lengths are.
    theta' = theta * (factor * length / trained - (factor - 1)) ^ (head_dim / (head_dim - 2)). In fp64: the
    fp32 pow gives one token alone other bits than the same token in a batch; rounded from fp64 they agree. On the CPU
    they agree by design, since `cpu_rows.powers` takes each power alone.
    """
    growth = rope.factor * lengths.double() / rope.original_max_position - (rope.factor - 1)
    head_dim = 2 * len(exponents)
    theta = rope.theta * powers(growth, exponents.new_full((1,), head_dim / (head_dim - 2)))[:, 0]
    return (1.0 / powers(theta, exponents)).float()


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3_frequencies(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    low, high, trained = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > trained / low, inv_freq / rope.factor, inv_freq)
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Blend of stretched and kept frequencies, by how often each pair turns over the trained length.

    Source: Peng et al., "YaRN" (2023), section 3.2.
    """
    first = _dim_turning(rope.beta_fast, rope, head_dim)
    last = _dim_turning(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    period = rope.theta ** _exponents(head_dim)
    return 1.0 / (rope.factor * period) * (1 - kept) + 1.0 / period * kept


def _dim_turning(turns: float, rope: RopeSpec, head_dim: int) -> float:
    """The (fractional) dimension that turns `turns` times over the trained length."""
    ratio = math.log(rope.original_max_position / (turns * 2 * math.pi))
    return head_dim * ratio / (2 * math.log(rope.theta))
