"""The embedding and the output projection, whose vocabulary ranks divide."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.linear import ColumnParallelLinear


class VocabParallelEmbedding(ColumnParallelLinear):
    """A row of hidden features for each token. Each rank has those of a part of the vocabulary."""

    def __init__(self, vocab: Split, hidden_size: int, name: str, build: BuildContext) -> None:
        """name: of the module."""
        super().__init__(hidden_size, {name: (vocab,)}, build)
        self._vocab = vocab

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [tokens] -> [tokens, hidden].

        A token's row is on one rank. The others add zeros to it, which is exact.
        """
        group = self._build.group
        if group is None:
            return self.weight.rows(token_ids)
        vocab = self._vocab.held
        elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
        rows = self.weight.rows((token_ids - vocab.start).masked_fill(elsewhere, 0))
        return group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))

    def logits(self, hidden: Tensor, widths: Sequence[int]) -> Tensor:
        """[rows, hidden] -> [rows, vocab], of which the first rank gets all and the others no row.

        widths: the part of the vocabulary of each rank.
        """
        logits = self.weight.apply(hidden, None)
        group = self._build.group
        if group is None:
            return logits
        collected = group.gather_columns(logits, widths)
        return logits.new_empty(0, self._vocab.total) if collected is None else collected


class ParallelLMHead(VocabParallelEmbedding):
    """The output projection, if it is not the embedding."""
