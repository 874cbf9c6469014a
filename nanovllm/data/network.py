"""Parts of a network as plain data: rotary embeddings and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Layers that have several MLPs ("experts"), of which a router chooses a few for each token.

    block: the module of a layer that holds its router and experts; projections: the names of the gate, up and down
    projections of an expert. Both as in the checkpoint.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the weights of a token's experts are scaled to the sum 1
    layers: tuple[bool, ...]  # per layer: whether it has experts and not one MLP
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def router(self, layer: int) -> str:
        """The router's module, a matrix [num_experts, hidden] that is never quantized."""
        return f"model.layers.{layer}.{self.block}.gate"

    def expert(self, layer: int, index: int) -> tuple[str, str, str]:
        """The modules of an expert: its gate, up and down projections."""
        prefix = f"model.layers.{layer}.{self.block}.experts.{index}."
        gate, up, down = self.projections
        return f"{prefix}{gate}", f"{prefix}{up}", f"{prefix}{down}"

    def matrices(self, layer: int, hidden: int) -> Iterator[tuple[str, int, int]]:
        """Module, output features and input features of each matrix of a layer's experts."""
        for index in range(self.num_experts):
            gate, up, down = self.expert(layer, index)
            yield gate, self.intermediate_size, hidden
            yield up, self.intermediate_size, hidden
            yield down, hidden, self.intermediate_size

    def share_read(self, rows: int) -> float:
        """The share of a layer's experts that `rows` rows read, if each row chooses evenly and alone."""
        return 1.0 - (1.0 - self.num_experts_per_tok / self.num_experts) ** rows
