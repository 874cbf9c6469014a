"""The head for multi-token prediction of Qwen3-Next and Qwen3.5: from a token's hidden state and the token after it, it
predicts the one after both. Source: Qwen's published checkpoints; DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024),
section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.layer_inputs import row_parts
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.module import Module

MTP = "mtp"  # what the names of its tensors begin with


class MTPHead(CausalLM):
    """A model of one layer, which reads hidden states beside the tokens. See `CausalLM`.

    Row p gets the token at position p + 1, and `ForwardContext.hidden` has the model's hidden state of position p after
    the final norm. Its own hidden states take their place for tokens that the model has not computed.
    """

    def __init__(self, model: CausalLM) -> None:
        """model: whose head it is, and whose embedding and output projection it uses. It says `has_mtp_head`."""
        self._model = model
        build = model.build.at(MTP)
        hidden = model.embedding.in_features
        norm = partial(type(model.norm), hidden, model.norm.eps)
        self.fc = ReplicatedLinear(2 * hidden, {"fc": hidden}, build)
        # of what `fc` reads, in its order
        self.input_norms = [norm(build.at(name)) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")]
        layers = [model.mtp_layer(build.at("layers.0"))]
        tables = (model.embedding, model.lm_head)
        super().__init__(model.config, layers, norm(build.at("norm")), model.rope, model.build, tables=tables)

    def children(self) -> Iterator[Module]:
        """Those of its own: without the model, its embedding and its output projection."""
        return iter((self.fc, *self.input_norms, *self.layers, self.norm))

    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states after the head's norm: int64 [tokens] -> [tokens, hidden]. `compute_logits` takes them."""
        assert ctx.hidden is not None, "a head reads the hidden states of its model"
        x = self.embed(input_ids)
        for parts in row_parts(self.chunk_rows, x, ctx.hidden):
            both = torch.cat([norm(rows) for norm, rows in zip(self.input_norms, parts, strict=True)], dim=1)
            self._kernels.copy_(parts[0], self.fc(both))
        self.forward_layers_(range(1), x, self.inputs(x, ctx))
        return self.normalize_(x)

    def on_meta(self) -> CausalLM:
        return MTPHead(self._model.on_meta())

    @property
    def architecture(self) -> str:
        return self._model.architecture
