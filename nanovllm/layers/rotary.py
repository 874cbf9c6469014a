"""Rotary position embedding: angles for the positions of one batch, without a table over all positions.

The frequencies of all RoPE kinds use the same fp32 operations in the same order as Transformers: at position 100,000
one rounding of a frequency changes an angle by 0.01 rad, so an equivalent formula is not enough.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.data.network import RopeSpec
from nanovllm.ops.row_kernels import kernels_on


class RotaryEmbedding:
    """cos and sin for the tokens of a batch, from their positions alone."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self._kernels = kernels_on(device, torch.float32)
        rotary_dim = rope.rotary_dim or head_dim
        # Computed on the CPU for every device: pow rounds differently elsewhere.
        self.inv_freq = inverse_frequencies(rope, rotary_dim).to(device)
        self._unrotated = (head_dim - rotary_dim) // 2  # pairs

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos [tokens, 1, head_dim] and sin [tokens, 1, head_dim / 2], fp32, of positions int64 [tokens].

        Pairs that are not rotated come last and have the angle 0.
        """
        angles = positions.float()[:, None] * self.inv_freq
        cos, sin = self._kernels.cos_sin(angles, self.rope.attention_factor)
        if self._unrotated:
            cos = F.pad(cos[:, : cos.shape[1] // 2], (0, self._unrotated), value=1.0).repeat(1, 2)
            sin = F.pad(sin, (0, self._unrotated))
        return cos[:, None, :], sin[:, None, :]

    def query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What queries are multiplied by after their rotation [tokens, 1, 1]; None if by nothing."""
        if not self.rope.query_beta:
            return None
        periods = torch.floor(positions / self.rope.original_max_position)
        return (1 + self.rope.query_beta * torch.log(1 + periods)).to(dtype)[:, None, None]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair: fp32 [head_dim / 2]."""
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, head_dim)
    if rope.kind == "longrope":
        return _longrope_frequencies(rope, head_dim)
    inv_freq = 1.0 / ((rope.theta * rope.theta_growth) ** _exponents(head_dim))
    if rope.kind == "proportional":  # the other pairs have the angle 0
        inv_freq[rope.rotated_pairs :] = 0.0
        return inv_freq / rope.factor
    if rope.frequency_factors:
        return inv_freq / torch.tensor(rope.frequency_factors)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inv_freq)
    return inv_freq


def _longrope_frequencies(rope: RopeSpec, rotary_dim: int) -> Tensor:
    """Each frequency divided by its factor: fp32 [rotary_dim / 2]. Source: Ding et al., "LongRoPE" (2024)."""
    return 1.0 / (torch.tensor(rope.frequency_factors) * rope.theta ** _exponents(rotary_dim))


def rotated_order(rotary_dim: int, head_dim: int, device: torch.device) -> Tensor:
    """The features of a head in the order in which those of a pair are half a head apart: int64 [head_dim].

    The first `rotary_dim` features are rotated, in pairs half of that apart.
    """
    rotated = torch.arange(rotary_dim)
    others = torch.arange(rotary_dim, head_dim)
    parts = zip(rotated.chunk(2), others.chunk(2), strict=True)
    # On the meta device these operations would make torch import its decompositions, which takes a second.
    return torch.cat([part for both in parts for part in both]).to(device)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3_frequencies(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones and blend between them (Llama 3.1)."""
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    trained = rope.original_max_position
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > trained / low, inv_freq / rope.factor, inv_freq)
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Blend stretched and kept frequencies by the number of rotations of each pair over the trained length.

    Source: Peng et al., "YaRN" (2023), section 3.2.
    """
    first = _dim_turning(rope.beta_fast, rope, head_dim)
    last = _dim_turning(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    width = (last - first) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    period = rope.theta ** _exponents(head_dim)
    return 1.0 / (rope.factor * period) * (1 - kept) + 1.0 / period * kept


def _dim_turning(turns: float, rope: RopeSpec, head_dim: int) -> float:
    """The (fractional) dimension that rotates `turns` times over the trained length."""
    ratio = math.log(rope.original_max_position / (turns * 2 * math.pi))
    return head_dim * ratio / (2 * math.log(rope.theta))
