"""What a prompt takes of a machine, before anything runs: memory, transfers and time, from a config alone.

The public names of the planner, for `nanovllm plan` and programs.
"""

from nanovllm.features.planner.asked import PlanRequest, plan_of
from nanovllm.features.planner.cards import find_card, find_link
from nanovllm.features.planner.page import page, plan_json
from nanovllm.features.planner.plan import Plan
from nanovllm.features.planner.predict import Rates
from nanovllm.features.planner.units import parse_byte_rate, parse_bytes, parse_compute_rate, parse_seconds, show_bytes
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.sizing import NoMemoryError

__all__ = [
    "NoMemoryError",
    "Plan",
    "PlanRequest",
    "Rates",
    "TransferCount",
    "find_card",
    "find_link",
    "page",
    "parse_byte_rate",
    "parse_bytes",
    "parse_compute_rate",
    "parse_seconds",
    "plan_json",
    "plan_of",
    "show_bytes",
]
