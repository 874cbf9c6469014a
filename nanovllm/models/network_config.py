"""From what a config says to a network: the class of the model file, and how its weights are stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from nanovllm.data.network import Network
from nanovllm.errors import ModelError
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import META, CausalLM
from nanovllm.layers.linear_method import LinearMethod
from nanovllm.layers.module import Module
from nanovllm.layers.parallel import MetaRanks, RankGroup
from nanovllm.models.config_fields import check_config
from nanovllm.models.registry import ARCHITECTURES


@dataclass(frozen=True)
class NetworkConfig:
    """What makes a network, before its dtype, device and ranks are chosen. Can be pickled.

    config: what Transformers' object says, which the model file reads; dtype: of the checkpoint, one of DTYPE_NAMES;
    method: how the matrices are stored; longest, rope_factors, is_gguf: as in `BuildContext`.
    """

    architecture: str
    config: Any
    dtype: str
    method: LinearMethod | None = None
    longest: int = 0
    rope_factors: tuple[float, ...] = ()
    is_gguf: bool = False

    def build(
        self,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        layer_built: Callable[[Module], None] | None = None,
    ) -> CausalLM:
        """The model, its parameters allocated and not initialized. group: the ranks that share it.

        layer_built: see `BuildContext`.

        Raises ModelError for what is not computed, and ConfigError for ranks that cannot share it.
        """
        check_config(ARCHITECTURES[self.architecture], self.config)
        context = BuildContext(
            dtype,
            device,
            self.method,
            group,
            longest=self.longest,
            rope_factors=self.rope_factors,
            is_gguf=self.is_gguf,
            layer_built=layer_built,
        )
        make: Callable[[Any, BuildContext], CausalLM] = ARCHITECTURES[self.architecture]
        return make(self.config, context)

    def on_meta(self, dtype: str | None = None, rank: int = 0, num_ranks: int = 1) -> CausalLM:
        """The model without memory, whole or of a rank, by default in the checkpoint's dtype."""
        group = None if num_ranks == 1 else MetaRanks(rank, num_ranks)
        return self.build(getattr(torch, dtype or self.dtype), META, group)

    @cached_property
    def network(self) -> Network:
        """What the engine needs to know of the whole network in the checkpoint's dtype."""
        return self.on_meta().network

    def of_ranks(self, num_ranks: int, dtype: str | None = None) -> list[Network]:
        """The parts of the network on each rank. Raises ConfigError as `check_ranks`."""
        return [self.on_meta(dtype, rank, num_ranks).network for rank in range(num_ranks)]

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError if there is too little for all ranks, or matrices cannot be divided as they are stored."""
        for rank in range(num_ranks):
            self.on_meta(None, rank, num_ranks)

    def for_length(self, longest: int) -> NetworkConfig:
        """For an engine whose longest sequence has `longest` tokens: see `RopeSpec.for_length`."""
        return replace(self, longest=longest)

    def stored_as(self, method: LinearMethod) -> NetworkConfig:
        """The network with its matrices in another form. Raises ModelError if one cannot be stored so."""
        for module, rows, columns in self.on_meta().matrices():
            try:
                deque(method.tensors(module, rows, columns), maxlen=0)
            except ModelError as error:
                raise ModelError(f"{module} cannot be stored as {method.name}: {error}") from None
        return replace(self, method=method)
