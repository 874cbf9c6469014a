"""The rotary embedding of a checkpoint as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one RoPE kind, named as in Transformers; fields that a kind does not use keep their default."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # how many times longer the context is than the trained one; default: unused
    original_max_position: int = 0  # positions the network was trained on: dynamic, llama3, yarn
    attention_factor: float = 1.0  # multiplies cos and sin: yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, ...] = ()  # default: what each frequency is divided by; none: as it is

    @property
    def length_dependent_above(self) -> int | None:
        """Sequence length above which a token's angles depend on the prompt's length; None if they never do.

        K rows computed for one prompt length above it do not serve another.
        """
        return self.original_max_position if self.kind == "dynamic" else None
