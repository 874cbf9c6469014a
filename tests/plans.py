"""What the tests of plans share: sizes of machines that are not here, and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm.config import engine_config
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.plan import Plan
from nanovllm.features.planner.predict import Link, Rates
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layout import layout_of
from nanovllm.memory.sizing import MemoryFacts
from nanovllm.models.decoder import Decoder

GIB = 1 << 30


def parameter_bytes(model: Decoder) -> int:
    """Bytes of all parameters that the decoder allocated."""
    return sum(slot.view.nbytes for _, slot in model.slots())


RATES = Rates(
    compute=1e9, attention=5e8, weight_bandwidth=1e9, head_bandwidth=2e9, device_bandwidth=4e8, link=Link(1e8, 5e7),
    step_seconds=1e-3, layer_seconds=1e-4, block_read_seconds=1e-5,
)  # fmt: skip


def sizing_for(
    network: Network, gpu_mem: int, host_mem: int, *, one_memory: bool = False, **arguments: Any
) -> KVSizing:
    config = engine_config(Path(__file__).parent, arguments)
    memory = MemoryFacts(gpu_mem, gpu_mem - network.weight_bytes, host_mem, one_memory, activation_peak=GIB)
    layout = layout_of(config, network.spec, network.itemsize)
    return KVSizing(config, layout, network.spec.max_model_len, memory, WATERMARK)


def make_plan(network: Network, sizing: KVSizing, rates: Rates) -> Plan:
    return Plan(network, sizing, rates, sizing.plan())
