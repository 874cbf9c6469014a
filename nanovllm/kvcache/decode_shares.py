"""How a decode step's KV bytes are shared out between the link, the CPU and the device. Pure arithmetic.

Of the host blocks that a layer of a decode step attends to, the CPU arm attends to some where they are; the others
stream through the ring to the device, which attends to them and to what is resident. With bytes H on the host, of which
the arm takes the share x, R on the device, and rates W of the link, M of the arm and D of the device, a layer takes

    max((1 - x) H / W,  weights / D + max((R + (1 - x) H) / D,  round trip + x H / M))

since the link streams all the time, across layers, while the arm can begin only once the layer's queries are there. One
term falls with x and the other rises, so the best x is where the arm and the slower of the other two end together.

Where link, arm and device are one processor, as on the CPU, nothing runs at the same time and the times add up:
(1 - x) H (1 / W + 1 / D) + x H / M + R / D. Reading bytes where they are is then as good as it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_CPU_ATTENTION_ROWS = 64  # query rows of one KV head for which the CPU kernel shares out keys over threads
MAX_CPU_ATTENTION_TOKENS = 512  # query tokens of a step, which bounds the buffers for queries and partial states

_SMOOTHING = 1 / 8  # weight of a new observation
_DRIFT = 4.0  # a rate stays within this factor of what was measured at start
_LEAST_BYTES = 1 << 20  # less than this says more about overhead than about a rate


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What moves or reads KV, in bytes per second."""

    link: float  # host to device
    host: float  # CPU attention from host memory
    device: float  # attention from device memory
    round_trip: float = 0.0  # seconds from queries on the device to a partial state on the device, attention left out
    one_processor: bool = False  # all of it runs on the same cores


# Reading costs the same for device and arm, and only the device's blocks are copied: the formula gives the arm all of
# them, whatever the rates are, so that nothing need be measured.
ONE_PROCESSOR = Bandwidths(link=1.0, host=1.0, device=1.0, one_processor=True)


@dataclass(frozen=True, slots=True)
class HostRead:
    """One layer of one host block that the arm may take. The link moves it once, attention reads it for each reader."""

    num_bytes: int
    readers: int = 1


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """What one layer of a decode step has to get through, in bytes."""

    reads: Sequence[HostRead]  # in the order in which the arm takes them
    link_bytes: int = 0  # streamed in any case
    device_bytes: int = 0  # attended on the device in any case, streamed or resident
    weight_bytes: int = 0  # read by the device while the arm has nothing to do


def can_attend_concurrently(head_dim: int) -> bool:
    """Whether the CPU attends beside a device: with the C++ kernel alone, which takes heads of a multiple of 16."""
    return head_dim % 16 == 0


def cpu_attention_query_len(heads: int, kv_heads: int) -> int:
    """The most new tokens of a sequence for which the arm attends: a decode's one, or a short chunk."""
    return max(1, MAX_CPU_ATTENTION_ROWS // (heads // kv_heads))


def layer_seconds(
    link_bytes: float, cpu_attention_bytes: float, device_bytes: float, weight_bytes: float, rates: Bandwidths
) -> float:
    """Seconds of one layer, by the formula above."""
    link, cpu, device = link_bytes / rates.link, cpu_attention_bytes / rates.host, device_bytes / rates.device
    weights = weight_bytes / rates.device
    if rates.one_processor:
        return link + cpu + device + weights
    return max(link, weights + max(device, cpu + rates.round_trip if cpu_attention_bytes else 0.0))


def best_share(host_bytes: float, resident_bytes: float, weight_bytes: float, rates: Bandwidths) -> float:
    """The share of `host_bytes` for the arm that makes a layer shortest, if bytes could be cut anywhere."""
    if host_bytes <= 0:
        return 0.0

    def seconds(share: float) -> float:
        streamed = (1 - share) * host_bytes
        return layer_seconds(streamed, share * host_bytes, resident_bytes + streamed, weight_bytes, rates)

    link, host, device = (host_bytes / rate for rate in (rates.link, rates.host, rates.device))
    resident, weights = resident_bytes / rates.device, weight_bytes / rates.device
    with_link = (link - weights - rates.round_trip) / (link + host)
    with_device = (resident + device - rates.round_trip) / (host + device)
    together = min(1.0, max(0.0, with_link, with_device))
    return min((0.0, 1.0 if rates.one_processor else together), key=seconds)


def blocks_for_cpu_attention(load: LayerLoad, rates: Bandwidths) -> int:
    """How many of the load's reads the arm takes so that the layer is shortest; the fewest, where several are equal."""
    streamed = load.link_bytes + sum(read.num_bytes for read in load.reads)
    device = load.device_bytes + sum(read.num_bytes * read.readers for read in load.reads)
    cpu = 0
    best, least = 0, layer_seconds(streamed, cpu, device, load.weight_bytes, rates)
    for count, read in enumerate(load.reads, start=1):
        attended = read.num_bytes * read.readers
        streamed, cpu, device = streamed - read.num_bytes, cpu + attended, device - attended
        seconds = layer_seconds(streamed, cpu, device, load.weight_bytes, rates)
        if seconds < least:
            best, least = count, seconds
    return best


def blocks_of_share(count: int, share: float) -> int:
    """`share` of `count` blocks as a whole number of them, halves up."""
    return int(count * share + 0.5)


def corrected(rate: float, at_start: float, num_bytes: int, seconds: float) -> float:
    """`rate` after `num_bytes` took `seconds`: smoothed, and never far from what was measured at start."""
    if num_bytes < _LEAST_BYTES or seconds <= 0:
        return rate
    smoothed = rate + _SMOOTHING * (num_bytes / seconds - rate)
    return min(max(smoothed, at_start / _DRIFT), at_start * _DRIFT)
