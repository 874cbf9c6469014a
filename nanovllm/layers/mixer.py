"""What mixes the tokens of a layer: attention, or a recurrence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from nanovllm.data.network import Kept
from nanovllm.layers.layer_inputs import LayerInputs
from nanovllm.layers.linear import Linear, RowAdapters
from nanovllm.layers.module import Module
from nanovllm.layers.norm import RMSNorm
from nanovllm.ops.cpu_kernels import FewRowLayer, HeadLayout


class MixedRows(NamedTuple):
    """A part of the rows of a pass, as they go on to the output projection."""

    x: Tensor  # of the residual stream [rows, hidden]
    mixed: Tensor  # what the output projection reads [rows, its inputs]
    adapters: RowAdapters | None


class Mixer(Module):
    """A projection of the rows, what mixes them, and the projection of its output, which the layer applies."""

    input: Linear
    output: Linear

    @property
    @abstractmethod
    def kept(self) -> Kept:
        """What a sequence keeps in the layer between two steps."""

    @property
    @abstractmethod
    def head_layout(self) -> HeadLayout:
        """How heads stand in the input projection, for the kernels of few rows."""

    @property
    def takes_few_rows(self) -> bool:
        """Whether the layer's kernels for few rows give what this one does."""
        return True

    @property
    def qk_weight(self) -> Tensor | None:
        """The weight of the norms over each head of q and k, with a row for each head."""
        return None

    @abstractmethod
    def mix(
        self, x: Tensor, inputs: LayerInputs, norm: RMSNorm | None, few_rows: FewRowLayer | None
    ) -> Iterator[MixedRows]:
        """Mix the rows x [tokens, hidden] of the residual stream, part after part. The layer finishes each before it
        asks for the next.

        norm: of the input, if there is one; few_rows: the layer's kernels for few rows.
        """
