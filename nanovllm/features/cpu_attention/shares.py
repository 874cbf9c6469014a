"""How a decode step's KV bytes are divided between the link, the CPU and the device. Pure arithmetic, without torch.

Of the host blocks that a layer of a decode step attends to, the CPU attends to some in host memory. The others are
loaded through the ring to the device, which attends to them and to the resident blocks. With H bytes on the host, of
which the CPU takes the share x, R bytes on the device, and the rates W of the link, M of CPU attention and D of the
device, a layer takes

    max((1 - x) H / W,  weights / D + max((R + (1 - x) H) / D,  x H / M))

since the link loads all the time, across layers, while CPU attention starts only once the layer's queries are computed.
One term falls with x and the other rises, so at the best x CPU attention and the slower of the other two end together.

Where link, CPU and device are one processor, nothing runs at the same time and the times add up:
(1 - x) H (1 / W + 1 / D) + x H / M + R / D. Attending to all host blocks in host memory is then optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_CPU_ATTENTION_ROWS = 64  # query rows of a KV head up to which the CPU kernel divides keys among threads
MAX_CPU_ATTENTION_TOKENS = 512  # query tokens of a step: bounds the buffers for queries and partial states


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Rates at which KV is copied or read, in bytes per second."""

    link: float  # host to device
    host: float  # CPU attention from host memory
    device: float  # attention from device memory
    one_processor: bool = False  # all of them run on the same cores


# Reading costs the device and the CPU the same, and only the device's blocks are copied. The formula gives the CPU all
# host blocks at any rate, so nothing has to be measured.
ONE_PROCESSOR = Bandwidths(link=1.0, host=1.0, device=1.0, one_processor=True)


@dataclass(frozen=True, slots=True)
class HostRead:
    """One layer of a host block that the CPU may attend to. It is loaded once, but read once for each reader."""

    num_bytes: int
    readers: int = 1


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The KV that one layer of a decode step reads, in bytes."""

    reads: Sequence[HostRead]  # in the order in which the CPU takes them
    link_bytes: int = 0  # loaded in any case
    device_bytes: int = 0  # attended on the device in any case, loaded or resident
    weight_bytes: int = 0  # read by the device before the layer's queries are there


def can_attend_concurrently(head_dim: int) -> bool:
    """Whether the C++ kernel, which concurrent attention needs, takes heads of this size: multiples of 16."""
    return head_dim % 16 == 0


def cpu_attention_query_len(heads: int, kv_heads: int) -> int:
    """The most new tokens of a sequence whose blocks the CPU attends to: one of a decode, or a short chunk."""
    return max(1, MAX_CPU_ATTENTION_ROWS // (heads // kv_heads))


def layer_seconds(
    link_bytes: float, cpu_attention_bytes: float, device_bytes: float, weight_bytes: float, rates: Bandwidths
) -> float:
    """Seconds of one layer, by the formula above."""
    link = link_bytes / rates.link
    cpu = cpu_attention_bytes / rates.host
    device = device_bytes / rates.device
    weights = weight_bytes / rates.device
    if rates.one_processor:
        return link + cpu + device + weights
    return max(link, weights + max(device, cpu))


def blocks_for_cpu_attention(load: LayerLoad, rates: Bandwidths) -> int:
    """How many of the load's reads the CPU takes to make the layer shortest; the fewest if several are equal."""
    streamed = load.link_bytes + sum(read.num_bytes for read in load.reads)
    device = load.device_bytes + sum(read.num_bytes * read.readers for read in load.reads)
    cpu = 0
    best = 0
    least = layer_seconds(streamed, cpu, device, load.weight_bytes, rates)
    for count, read in enumerate(load.reads, start=1):
        attended = read.num_bytes * read.readers
        streamed = streamed - read.num_bytes
        cpu = cpu + attended
        device = device - attended
        seconds = layer_seconds(streamed, cpu, device, load.weight_bytes, rates)
        if seconds < least:
            best = count
            least = seconds
    return best
