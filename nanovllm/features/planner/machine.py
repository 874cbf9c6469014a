"""The speed of a machine: measured (`measure.py`) or given. An unknown rate is None and never guessed."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.memory.budget import TransferCount


@dataclass(frozen=True, slots=True)
class Link:
    """The link between host and device during a step, in bytes per second each way.

    overlap: the share of the shorter of copying and computing that the longer one hides. 1 with copy engines; less if
    copies take cores and memory bandwidth from the computation, as on the CPU.
    """

    h2d: float
    d2h: float
    duplex: bool = True  # both directions at the same time
    overlap: float = 1.0

    def seconds(self, moved: TransferCount) -> float:
        """Time of the copies alone."""
        ways = (moved.h2d_bytes / self.h2d, moved.d2h_bytes / self.d2h)
        return max(ways) if self.duplex else sum(ways)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, and fixed costs of a step in seconds. None: unknown."""

    compute: float | None = None  # operations of projections and MLPs on many rows, with norms and activations
    attention: float | None = None  # operations of attention on many rows
    weight_bandwidth: float | None = None  # bytes of a layer's weights that a step of few rows reads
    head_bandwidth: float | None = None  # bytes of the output projection
    device_bandwidth: float | None = None  # bytes of KV cache on the device that decode attends to
    host_bandwidth: float | None = None  # bytes of KV cache on the host that CPU cores attend to
    link: Link | None = None
    interconnect: float | None = None  # bytes that a tensor-parallel rank receives from the others
    all_reduce_seconds: float = 0.0  # of a sum over the ranks, besides its bytes
    step_seconds: float = 0.0  # of a step: batch, embedding, final norm, choosing the token
    layer_seconds: float = 0.0  # of a layer in a step
    block_read_seconds: float = 0.0  # of one block that passes through the ring in a layer
