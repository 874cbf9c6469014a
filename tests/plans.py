"""What the tests of plans share: the bytes of a decoder, and rates."""

from __future__ import annotations

from nanovllm.features.planner.predict import Link, Rates
from nanovllm.models.decoder import Decoder


def parameter_bytes(model: Decoder) -> int:
    """Bytes of all parameters that the decoder allocated."""
    return sum(slot.view.nbytes for _, slot in model.slots())


RATES = Rates(
    compute=1e9, attention=5e8, weight_bandwidth=1e9, head_bandwidth=2e9, device_bandwidth=4e8, link=Link(1e8, 5e7),
    step_seconds=1e-3, layer_seconds=1e-4, block_read_seconds=1e-5,
)  # fmt: skip
