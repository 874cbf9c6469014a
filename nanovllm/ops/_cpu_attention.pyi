"""csrc/cpu_attention.cpp. Use it through nanovllm.ops.cpu_attention, which checks its arguments."""

from collections.abc import Sequence

def attend(
    *,
    isa: str,
    dtype: str,
    kv_dtype: str,
    q: int,
    q_strides: tuple[int, int],
    out: int,
    out_strides: tuple[int, int],
    lse: int,
    lse_strides: tuple[int, int],
    blocks: int,
    block_count: int,
    sequences: int,
    sequence_count: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    scale: float,
    carry: bool,
    threads: int,
) -> None:
    """Addresses of q, out, lse, int64 block addresses and int64 [sequence_count, 7]; strides are (token, head).

    Raises ValueError for sequences whose rows or blocks lie outside of what is given.
    """

def quantize_rows(
    *,
    dtype: str,
    kv_dtype: str,
    x: int,
    strides: tuple[int, int],
    rows: int,
    tokens: int,
    heads: int,
    head_dim: int,
    threads: int,
) -> None:
    """Rows [tokens, heads, head_dim + 4] of x, whose strides are (token, head), both as addresses."""

class Meter:
    """What tasks have read so far, and in what time."""

    def __init__(self) -> None: ...
    def read(self) -> tuple[int, float]:
        """Bytes and seconds."""

class HostTask:
    """One layer of a step's attention, for any thread to run."""

    def take(self) -> tuple[int, int]:
        """Addresses of a function and of its data: calling the function once runs the task."""

    def drop(self, data: int) -> None:
        """Let go of data that was taken and will not be run."""

    def failure(self) -> str | None:
        """What went wrong when it ran."""

class HostAttention:
    """Arguments of a step's attention, kept for its tasks."""

    def __init__(
        self,
        *,
        isa: str,
        dtype: str,
        kv_dtype: str,
        q: int,
        q_strides: tuple[int, int],
        out: int,
        out_strides: tuple[int, int],
        lse: int,
        lse_strides: tuple[int, int],
        calls: Sequence[tuple[int, int, int, int]],
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int,
        scale: float,
        threads: int,
        read_bytes: int,
        meter: Meter,
    ) -> None: ...
    def task(self, block_offset: int) -> HostTask:
        """The task whose blocks lie so many bytes behind the addresses given."""

class PagedStep:
    """Arguments of a step's attention over a pool [layers, blocks, 2, kv_heads, block_size, head_dim]."""

    def __init__(
        self,
        *,
        isa: str,
        dtype: str,
        kv_dtype: str,
        pool: int,
        layer_stride: int,
        block_stride: int,
        layers: int,
        pool_blocks: int,
        slots: int,
        tokens: int,
        blocks: int,
        block_count: int,
        sequences: int,
        sequence_count: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int,
        scale: float,
        threads: int,
    ) -> None:
        """Addresses of the pool, of int64 slots [tokens], blocks and sequences [sequence_count, 7], which are copied;
        strides are bytes. Raises ValueError for what lies outside of the pool or the rows."""

    def attend(self, layer: int, q: int, k: int, v: int, sinks: int) -> None:
        """Write k and v into the layer's slots, attend, and write the outputs over q. All are dense.

        sinks: the address of fp32 [heads], from which the LSE of a row begins, or 0."""
