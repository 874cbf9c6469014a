"""What a prompt takes of a machine, before anything runs: memory, transfers and time, from a config alone. No torch.

The public names of the planner, for `nanovllm plan` and programs.
"""

from nanovllm.features.planner.machine import Link, Rates
from nanovllm.features.planner.plan import Plan
from nanovllm.features.planner.planning import PlanRequest, plan_of
from nanovllm.features.planner.report import plan_json, plan_table, running_arguments
from nanovllm.features.planner.units import parse_byte_rate, parse_bytes, parse_compute_rate, parse_seconds
from nanovllm.memory.budget import TransferCount, predict_request
from nanovllm.memory.layerwise import prefill_steps
from nanovllm.memory.layout import KVLayout

__all__ = [
    "KVLayout",
    "Link",
    "Plan",
    "PlanRequest",
    "Rates",
    "TransferCount",
    "cpu_kernels_line",
    "parse_byte_rate",
    "parse_bytes",
    "parse_compute_rate",
    "parse_seconds",
    "plan_json",
    "plan_of",
    "plan_table",
    "predict_request",
    "prefill_steps",
    "running_arguments",
]


def cpu_kernels_line() -> str:
    """The kernels that an engine on this machine's CPU uses; nothing if the machine has a GPU."""
    from nanovllm.features.planner import local_machine  # imports torch

    return local_machine.cpu_kernels_line()
