"""RMS norms of all query heads together, and of all key heads."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.layers.build_context import Split
from nanovllm.layers.dense_weight import linear
from nanovllm.layers.parallel import RankGroup
from nanovllm.ops.row_kernels import kernels_on


class JointNorms:
    """One mean over all heads of a token's q and one over those of its k, and a weight for each feature.

    Of several ranks each has the features of its heads, and the means are those of all.
    """

    def __init__(self, weight: Tensor, sizes: tuple[int, int], eps: float, dtype: torch.dtype) -> None:
        """weight: [features of q and of k] in `dtype`, which is that of q and k, or in fp32; sizes: both numbers."""
        self.weight = weight
        self._sizes = sizes
        self._eps = eps
        self._kernels = kernels_on(weight.device, dtype)
        self._ranks: _SquaresOfRanks | None = None

    def divide(self, heads: Split, kv_heads: Split, group: RankGroup) -> None:
        """Take means over the heads of all ranks of the group."""
        self._ranks = _SquaresOfRanks(self._sizes, heads, kv_heads, group, self.weight.device)

    def normalize_(self, q_and_k: Tensor) -> None:
        """Normalize rows [tokens, features of q and k] in place."""
        parts = list(zip(q_and_k.split(self._sizes, 1), self.weight.split(self._sizes), strict=True))
        if self._ranks is None:
            for x, weight in parts:
                self._kernels.copy_(x, self._kernels.rms_norm(x, weight, self._eps))
            return
        scales = (self._ranks.means(q_and_k) + self._eps).sqrt_().reciprocal_()
        for (x, weight), scale in zip(parts, scales.split(1, 1), strict=True):
            x.copy_((x.float() * scale).to(weight.dtype).mul_(weight))


class _SquaresOfRanks:
    """The means of squares over the heads of all ranks. A KV head that several ranks hold counts once."""

    def __init__(
        self, sizes: tuple[int, int], heads: Split, kv_heads: Split, group: RankGroup, device: torch.device
    ) -> None:
        has_first_queries = heads.held.start % (heads.total // kv_heads.total) == 0  # of its first KV head
        head_dim = sizes[0] // heads.size
        self._group = group
        self._summed = torch.zeros(2, sum(sizes), dtype=torch.float32, device=device)  # of q, and of k
        self._summed[0, : sizes[0]] = 1.0
        self._summed[1, sizes[0] :] = float(has_first_queries)
        widths = [heads.total * head_dim, kv_heads.total * head_dim]
        self._widths = torch.tensor(widths, dtype=torch.float32, device=device)

    def means(self, q_and_k: Tensor) -> Tensor:
        """[tokens, features of q and k] -> fp32 [tokens, 2]. The bits of a row do not depend on the other rows."""
        return self._group.all_reduce(linear(q_and_k.float().square(), self._summed)).div_(self._widths)
