"""The head for multi-token prediction of Qwen3-Next and Qwen3.5: from a token's hidden state and the token after it, it
predicts the one after both. Source: Qwen's published checkpoints; DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.linear import Linear
from nanovllm.layers.linear_method import NamedSlots, StoredWeight
from nanovllm.models.decoder import Decoder, norm_dtype, norm_slot, row_parts
from nanovllm.models.families import MTP
from nanovllm.models.mtp_spec import INPUT_NORMS, mtp_spec, mtp_weight_bytes


class MTPHead(Decoder):
    """A decoder of one layer, which reads hidden states beside the tokens. See `Decoder`.

    Row p gets the token at position p + 1, and `ForwardContext.hidden` has the model's hidden state of position p after
    the final norm. Its own hidden states take their place for tokens that the model has not computed.
    """

    def __init__(self, model: Decoder) -> None:
        """model: the decoder whose head it is, and whose embedding and output projection it uses."""
        spec = mtp_spec(model.spec)
        super().__init__(spec, model.dtype, model.device, shared=model)
        linear = partial(Linear, method=spec.quantization, prefix=MTP, dtype=self.dtype, device=self.device)
        self.fc = linear(2 * spec.hidden_size, {"fc": spec.hidden_size}, bias=False)
        weight = partial(torch.empty, spec.hidden_size, dtype=norm_dtype(spec, self.dtype), device=self.device)
        self.input_norms = tuple(weight() for _ in INPUT_NORMS)

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the head's norm: int64 [tokens] -> [tokens, hidden]. `compute_logits` takes them."""
        assert ctx.hidden is not None, "a head reads the hidden states of its model"
        x = self.embed(input_ids)
        eps = self.spec.rms_norm_eps
        for parts in row_parts(self.chunk_rows, x, ctx.hidden):
            pairs = zip(parts, self.input_norms, strict=True)
            both = torch.cat([self._kernels.rms_norm(part, norm, eps) for part, norm in pairs], dim=1)
            self._kernels.copy_(parts[0], self.fc(both))
        self.layers[0].forward_(x, self._inputs(x, ctx, range(1)))
        return self.normalize_(x)

    def slots(self) -> NamedSlots:
        """The parameter view of each of the head's own checkpoint tensors."""
        yield from self.fc.slots()
        yield from self.layers[0].slots()
        for name, norm in zip((*INPUT_NORMS, "norm"), (*self.input_norms, self.norm), strict=True):
            yield f"{MTP}{name}.weight", norm_slot(self.spec, norm, norm.shape)

    def _weights(self) -> Iterator[StoredWeight]:
        layer = self.layers[0]
        yield from (self.fc.weight, layer.qkv.weight, layer.o.weight, *layer.mlp.weights())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own parameters."""
        return mtp_weight_bytes(self.spec, self.dtype.itemsize)
