"""Random weights for a network without a checkpoint, for benchmarks and shape tests."""

from __future__ import annotations

import torch

from nanovllm.models.decoder import Decoder


def fill_with_random_weights(decoder: Decoder, seed: int) -> None:
    """Fill every parameter from `seed`: the same device, dtype and seed give the same weights.

    Matrices are uniform with variance 1 / columns, so that a normalized input gives outputs of size 1; norm
    weights are within 0.1 of 1 and biases within 0.1 of 0.
    """
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    for name, slot in decoder.slots():
        if len(slot.shape) == 2:
            bound = (3 / slot.shape[1]) ** 0.5
            slot.view.uniform_(-bound, bound, generator=generator)
            continue
        centre = 0.0 if name.endswith(".bias") else 1.0
        values = torch.empty(slot.shape, dtype=slot.view.dtype, device=decoder.device)
        slot.write(values.uniform_(centre - 0.1, centre + 0.1, generator=generator))
