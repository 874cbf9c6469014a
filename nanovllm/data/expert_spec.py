"""The mixture of experts of a checkpoint as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
