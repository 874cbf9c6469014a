"""GPUs and links by name, with the rates of their makers' data sheets: upper bounds, which no program reaches.

Sizes are the sheets' GB, 10^9 bytes, which is less than the memory that a driver reports. Compute is that of bf16 (T4
and V100: fp16) matrix products with fp32 sums, dense: sheets that give it "with sparsity" are halved. Links are PCIe
with 16 lanes: its signalling rate less its encoding, each way.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}  # PCI-SIG: 8, 16 and 32 GT/s on 16 lanes, 128 of 130 bits


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    gpu_mem: int  # bytes
    compute: float  # operations per second
    device_bandwidth: float  # bytes per second
    link: float  # bytes per second, each way


def _card(name: str, gigabytes: int, teraflops: float, gigabytes_per_second: float, pcie: int) -> Card:
    return Card(name, gigabytes * 10**9, teraflops * 1e12, gigabytes_per_second * 1e9, PCIE[pcie])


CARDS = (
    # NVIDIA H100, H200, H100 NVL data sheets (compute given with sparsity)
    _card("H200", 141, 989.5, 4800, 5),
    _card("H100", 80, 989.5, 3350, 5),
    _card("H100 PCIe", 80, 756, 2000, 5),
    _card("H100 NVL", 94, 835.5, 3900, 5),
    # NVIDIA A100, A40, A30, A10 data sheets
    _card("A100 80GB", 80, 312, 2039, 4),
    _card("A100 80GB PCIe", 80, 312, 1935, 4),
    _card("A100 40GB", 40, 312, 1555, 4),
    _card("A40", 48, 149.7, 696, 4),
    _card("A30", 24, 165, 933, 4),
    _card("A10", 24, 125, 600, 4),
    # NVIDIA L40S, L40 and L4 data sheets
    _card("L40S", 48, 362.05, 864, 4),
    _card("L40", 48, 181.05, 864, 4),
    _card("L4", 24, 121, 300, 4),
    # NVIDIA T4 and V100 data sheets
    _card("T4", 16, 65, 320, 3),
    _card("V100 32GB", 32, 125, 900, 3),
    # NVIDIA RTX A6000 and RTX 6000 Ada data sheets, Ampere GA102 and Ada GPU architecture papers
    _card("RTX A6000", 48, 154.8, 768, 4),
    _card("RTX 6000 Ada", 48, 364.2, 960, 4),
    # Appendices of NVIDIA's GPU architecture papers: RTX Blackwell, Ada, Ampere GA102
    _card("RTX 5090", 32, 209.5, 1792, 5),
    _card("RTX 5080", 16, 112.6, 960, 5),
    _card("RTX 5070 Ti", 16, 87.9, 896, 5),
    _card("RTX 4090", 24, 165.2, 1008, 4),
    _card("RTX 4080", 16, 97.5, 716.8, 4),
    _card("RTX 3090", 24, 71, 936, 4),
    _card("RTX 3080", 10, 59.5, 760, 4),
)
SHORT = {"a100": "A100 40GB", "h100sxm": "H100", "h10080gb": "H100", "a100sxm80gb": "A100 80GB", "v100": "V100 32GB"}


def find_card(name: str) -> Card:
    """The card of a name such as "RTX 4090", "rtx4090" or "4090". Raises ValueError with the nearest names."""
    words = _key(name)
    words = _key(SHORT.get(words, words))
    known = {_key(card.name): card for card in CARDS}
    card = known.get(words) or known.get(f"rtx{words}")
    if card is None:
        near = difflib.get_close_matches(words, known, n=3, cutoff=0.5)
        names = ", ".join(known[key].name for key in near) or ", ".join(card.name for card in CARDS)
        raise ValueError(
            f"{name!r} is no card that is known; {'the nearest are' if near else 'known are'} {names}; --gpu-mem and "
            "--compute describe another one, and without all of these the plan is for this machine"
        )
    return card


def find_link(name: str) -> float | None:
    """Bytes per second each way of a link such as "PCIe 4" or "PCIe 4 x8"; None if the text is no such name."""
    match = re.fullmatch(r"pci-?e(?:xpress)?\s*(?:gen)?\s*(\d+)(?:\.0)?\s*(?:x\s*(\d+))?", name.strip(), re.IGNORECASE)
    if match is None:
        return None
    generation = int(match[1])
    lanes = int(match[2] or 16)
    if generation not in PCIE or lanes not in (1, 2, 4, 8, 16):
        raise ValueError(f"{name!r} is no link that is known; known are PCIe 3, 4 and 5, with x1, x2, x4, x8 or x16")
    return PCIE[generation] * lanes / 16


def _key(name: str) -> str:
    """Lower-case letters and digits, without the maker's names."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
