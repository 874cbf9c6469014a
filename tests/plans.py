"""What the tests of plans share: the bytes of a model, and rates."""

from __future__ import annotations

from nanovllm.features.planner.predict import Rates
from nanovllm.layers.causal_lm import CausalLM


def parameter_bytes(model: CausalLM) -> int:
    """Bytes of all parameters that the model allocated."""
    return sum(slot.view.nbytes for _, slot in model.slots())


RATES = Rates(compute=1e9, device_bandwidth=4e8, link=1e8)
