"""What a prompt takes of a machine, before anything runs: memory, transfers and time, from a config alone.

The public names of the planner, for `nanovllm plan` and programs.
"""

from nanovllm.features.planner.asked import PlanRequest, plan_of
from nanovllm.features.planner.cards import find_card, find_link
from nanovllm.features.planner.drafts import ACCEPTANCE
from nanovllm.features.planner.outlook import Outlook, outlook_of
from nanovllm.features.planner.page import page
from nanovllm.features.planner.plan import Plan
from nanovllm.features.planner.predict import Link, Rates
from nanovllm.features.planner.report import RATES, plan_json, running_arguments
from nanovllm.features.planner.units import parse_byte_rate, parse_bytes, parse_compute_rate, parse_seconds, show_bytes
from nanovllm.memory.budget import TransferCount

__all__ = [
    "ACCEPTANCE",
    "RATES",
    "Link",
    "Outlook",
    "Plan",
    "PlanRequest",
    "Rates",
    "TransferCount",
    "cpu_kernels_line",
    "find_card",
    "find_link",
    "outlook_of",
    "page",
    "parse_byte_rate",
    "parse_bytes",
    "parse_compute_rate",
    "parse_seconds",
    "plan_json",
    "plan_of",
    "running_arguments",
    "show_bytes",
]


def cpu_kernels_line() -> str:
    """The kernels that an engine on this machine's CPU uses; nothing if the machine has a GPU."""
    import torch

    from nanovllm.ops.cpu_kernels import cpu_kernel_choice

    return "" if torch.cuda.is_available() else f"  CPU kernels: {cpu_kernel_choice()}\n"
