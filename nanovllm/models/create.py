"""Which decoder a network needs."""

from __future__ import annotations

import torch

from nanovllm.layers.parallel import RankGroup
from nanovllm.models.decoder import Decoder
from nanovllm.models.gemma4 import Gemma4Decoder
from nanovllm.models.spec import DecoderSpec


def create_decoder(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, group: RankGroup | None = None
) -> Decoder:
    """The decoder of a network, its parameters allocated and not initialized. group: as for `Decoder`."""
    if spec.gemma4 is not None:
        return Gemma4Decoder(spec, spec.gemma4, dtype, device, group)
    return Decoder(spec, dtype, device, group)
