"""The rotary embedding of a checkpoint as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one RoPE kind, named as in Transformers; fields that a kind does not use keep their default."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # how many times longer the context is than the trained one; default: unused
    # Positions the network was trained on: dynamic, llama3, yarn, longrope, and linear where it is not
    # max_position_embeddings.
    original_max_position: int = 0
    attention_factor: float = 1.0  # multiplies cos and sin: yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    # What each frequency is divided by. default: none is as it is. longrope: up to the trained length, and beyond it.
    frequency_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotary_dim: int | None = None  # features of a head that are rotated, the first ones; None: all

    @property
    def length_dependent_above(self) -> int | None:
        """Sequence length above which a token's angles depend on the prompt's length; None if they never do.

        K rows computed for one prompt length above it do not serve another.
        """
        return self.original_max_position if self.kind in ("dynamic", "longrope") else None

    @property
    def recomputed_above(self) -> int | None:
        """Sequence length above which all tokens have other angles than below; None if there is none.

        A sequence that grows beyond it is computed again from its first token.
        """
        return self.original_max_position if self.kind == "longrope" else None
