"""
Attention, linear layers and row-wise work on the CPU. Use nanovllm.ops, which checks the arguments.

A tensor is its address, or a pair of its address and its stride from row to row in elements. Address 0 means
that there is none. `dtype` is "bfloat16", "float16" or "float32"; `isa` is one of `instruction_sets()`.
"""

from __future__ import annotations

import collections.abc

__all__: list[str] = [
    "INTERLEAVED_INPUTS",
    "INTERLEAVED_ROWS",
    "DeltaRuns",
    "DeltaSizes",
    "DeltaWeights",
    "DenseWeight",
    "HostAttention",
    "HostTask",
    "Layer",
    "Linear",
    "PackedWeight",
    "PagedStep",
    "add",
    "attend",
    "copy",
    "cos_sin",
    "delta_prepare",
    "delta_recur",
    "draw",
    "fill",
    "gate",
    "gated_norm",
    "gated_unit",
    "gather",
    "instruction_sets",
    "interleave",
    "likeliest",
    "linear",
    "narrow",
    "packed_linear",
    "place_heads",
    "quantize_rows",
    "rms_norm",
    "sigmoid",
    "softmax",
    "store_kv",
    "use_huge_pages",
    "widen",
]

class PackedWeight:
    """
    A weight in panels, valid while its tensors live.
    """
    def __init__(
        self,
        *,
        scheme: str,
        data: int,
        scales: int,
        scale_dtype: str,
        zeros: int,
        outputs_per_scale: int,
        group_size: int,
        in_features: int,
        out_features: int,
    ) -> None: ...

class DeltaSizes:
    def __init__(self, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> None: ...

class DeltaRuns:
    """
    Addresses of int64, valid while their tensors live.
    """
    def __init__(self, *, slots: int, starts: int, of_row: int, count: int, rows: int, num_slots: int) -> None:
        """
        Raises ValueError for a slot that is none of `num_slots`.
        """

class DenseWeight:
    def __init__(self, *, address: int, in_features: int, out_features: int, interleaved: bool) -> None: ...

class Linear:
    """
    The product with weights one below the other, of the same inputs.
    """
    def __init__(self, *, parts: collections.abc.Sequence[DenseWeight | PackedWeight], bias: int) -> None: ...

class DeltaWeights:
    """
    rate and dt_bias are fp32, the others of the layer's dtype.
    """
    def __init__(self, *, sizes: DeltaSizes, conv: int, rate: int, dt_bias: int, norm: int) -> None: ...

class Layer:
    """
    A norm is its address and whether it is fp32.
    """
    def __init__(
        self,
        *,
        isa: str,
        packed_isa: str,
        dtype: str,
        input_norm: tuple[int, bool],
        heads_norm: tuple[int, bool],
        mlp_norm: tuple[int, bool],
        attention_output_norm: tuple[int, bool],
        mlp_output_norm: tuple[int, bool],
        eps: float,
        qkv: Linear,
        o: Linear,
        gate_up: Linear,
        down: Linear,
        head_dim: int,
        rotary_dim: int,
        gated: bool,
        activation: str,
    ) -> None: ...
    def finish(self, x: tuple[int, int], attended: tuple[int, int], count: int, threads: int) -> None:
        """
        Add the output projection of the attended rows and the MLP to the residual stream x.
        """
    def project(
        self,
        x: tuple[int, int],
        cos: tuple[int, int],
        sin: tuple[int, int],
        q: tuple[int, int],
        k: tuple[int, int],
        v: tuple[int, int],
        gate: tuple[int, int],
        count: int,
        q_heads: int,
        kv_heads: int,
        threads: int,
    ) -> None:
        """
        Write the rows' q, k and v, and the gates of q.
        """
    def recur(
        self,
        weights: DeltaWeights,
        runs: DeltaRuns,
        x: tuple[int, int],
        conv: tuple[int, int],
        states: tuple[int, int],
        projected: tuple[int, int],
        y: tuple[int, int],
        threads: int,
    ) -> None:
        """
        Write what the output projection of a recurrent layer reads, and advance its states.
        """

class HostTask:
    """
    The attention of one layer of a step, for any thread to run.
    """
    def drop(self, data: int) -> None:
        """
        Free data that was taken and will not be run.
        """
    def failure(self) -> str | None:
        """
        What went wrong when it ran, or None.
        """
    def take(self) -> tuple[int, int]:
        """
        (function, data): addresses. Calling function(data) once runs the task.
        """

class HostAttention:
    """
    The arguments of a step's attention, kept for its tasks.
    """
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
        calls: collections.abc.Sequence[tuple[int, int, int, int]],
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int,
        scale: float,
        threads: int,
    ) -> None:
        """
        calls: (block addresses, their number, sequences, their number), which are copied.
        """
    def task(self, block_offset: int) -> HostTask:
        """
        The task whose blocks lie so many bytes behind the addresses given.
        """

class PagedStep:
    """
    A step's attention over a pool [layers, blocks, 2, kv_heads, block_size, head_dim].
    """
    def __init__(
        self,
        *,
        isa: str,
        dtype: str,
        kv_dtype: str,
        pool: int,
        layer_stride: int,
        block_stride: int,
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
        """
        int64 slots [tokens], blocks and sequences [sequence_count, 7] are copied; strides are bytes.

        Raises ValueError for what lies outside of the pool or the rows.
        """
    def attend(self, layer: int, q: int, k: int, v: int, sinks: int) -> None:
        """
        Write k and v into the layer's slots, attend, and write the outputs over q. All are dense.

        sinks: the address of fp32 [heads], from which the LSE of a row begins, or 0.
        """

def add(*, dtype: str, x: tuple[int, int], addend: tuple[int, int], rows: int, size: int, threads: int) -> None:
    """
    x += addend.
    """

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
    """
    blocks: int64 block addresses; sequences: int64 [sequence_count, 7]; strides are (token, head).

    Raises ValueError for sequences whose rows or blocks lie outside of what is given.
    """

def copy(*, x: tuple[int, int], y: tuple[int, int], rows: int, row_bytes: int, threads: int) -> None:
    """
    y = x. Strides are in bytes.
    """

def cos_sin(
    *,
    angles: tuple[int, int],
    cos: tuple[int, int],
    sin: tuple[int, int],
    rows: int,
    size: int,
    factor: float,
    threads: int,
) -> None:
    """
    All fp32; cos is twice as wide as the angles.
    """

def delta_prepare(
    *,
    dtype: str,
    sizes: DeltaSizes,
    runs: DeltaRuns,
    x: tuple[int, int],
    weight: int,
    conv: tuple[int, int],
    b: tuple[int, int],
    a: tuple[int, int],
    rate: int,
    dt_bias: int,
    qk: int,
    v: int,
    decay: int,
    beta: int,
    threads: int,
) -> None:
    """
    rate, dt_bias, qk, decay and beta are fp32. A row of conv is a slot.
    """

def delta_recur(
    *,
    dtype: str,
    sizes: DeltaSizes,
    runs: DeltaRuns,
    qk: int,
    v: int,
    decay: int,
    beta: int,
    states: tuple[int, int],
    y: int,
    threads: int,
) -> None:
    """
    qk, decay, beta and states are fp32. A row of states is a slot.
    """

def draw(
    *, scores: tuple[int, int], tokens: tuple[int, int], starts: int, drawn: int, rows: int, size: int, threads: int
) -> None:
    """
    fp32 scores; int64 tokens, starts and drawn.
    """

def fill(*, x: int, size: int, value: float, threads: int) -> None:
    """
    Set all elements of an fp32 x.
    """

def gate(*, dtype: str, x: tuple[int, int], gate: tuple[int, int], rows: int, size: int, threads: int) -> None:
    """
    x *= sigmoid(gate).
    """

def gated_norm(
    *,
    dtype: str,
    x: tuple[int, int],
    z: tuple[int, int],
    weight: int,
    y: tuple[int, int],
    rows: int,
    heads: int,
    size: int,
    eps: float,
    threads: int,
) -> None:
    """
    Norm of each head, times weight and silu(z).
    """

def gated_unit(
    *, dtype: str, activation: str, gate_up: tuple[int, int], y: tuple[int, int], rows: int, size: int, threads: int
) -> None:
    """
    activation: "silu", "gelu_tanh" or "clamped_swiglu".
    """

def gather(
    *,
    dtype: str,
    weight: int,
    y: int,
    indices: int,
    count: int,
    in_features: int,
    out_features: int,
    interleaved: bool,
    threads: int,
) -> None:
    """
    Copy rows of a dense weight to y. Raises IndexError for an index outside of it.
    """

def instruction_sets() -> list[str]:
    """
    The instruction sets that this machine runs, best first. Raises ValueError if NANOVLLM_CPU_ISA names another.
    """

def interleave(*, dtype: str, weight: int, out_features: int, in_features: int, back: bool, threads: int) -> None:
    """
    Reorder a weight in place for `interleaved=True`, or back.
    """

def likeliest(*, dtype: str, logits: tuple[int, int], tokens: int, rows: int, size: int, threads: int) -> None:
    """
    The int64 index of each row's largest element.
    """

def linear(
    *,
    isa: str,
    dtype: str,
    x: tuple[int, int],
    weight: int,
    bias: int,
    y: tuple[int, int],
    rows: int,
    in_features: int,
    out_features: int,
    interleaved: bool,
    threads: int,
) -> None:
    """
    y = x W^T + bias.
    """

def narrow(*, dtype: str, x: tuple[int, int], y: tuple[int, int], rows: int, size: int, threads: int) -> None:
    """
    y = x, where x is fp32 and y of `dtype`.
    """

def packed_linear(
    *,
    isa: str,
    dtype: str,
    x: tuple[int, int],
    weight: PackedWeight,
    bias: int,
    y: tuple[int, int],
    rows: int,
    threads: int,
) -> None:
    """
    y = x W^T + bias with a packed weight.
    """

def place_heads(
    *,
    dtype: str,
    heads: tuple[int, int],
    weight: tuple[int, bool],
    cos: tuple[int, int],
    sin: tuple[int, int],
    q: tuple[int, int],
    k: tuple[int, int],
    v: tuple[int, int],
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    threads: int,
) -> None:
    """
    Strides are from token to token; the heads of a token are contiguous. weight: as of `rms_norm`.
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
    """
    x, with strides (token, head), to dense rows [tokens, heads, head_dim + 4] of 8 bits.
    """

def rms_norm(
    *,
    dtype: str,
    x: tuple[int, int],
    addend: tuple[int, int],
    weight: tuple[int, bool],
    y: tuple[int, int],
    rows: int,
    size: int,
    eps: float,
    threads: int,
) -> None:
    """
    weight: its address and whether it is fp32. An addend is added to x in place before.
    """

def sigmoid(*, x: tuple[int, int], y: tuple[int, int], rows: int, size: int, threads: int) -> None:
    """
    fp32 rows.
    """

def softmax(*, x: tuple[int, int], y: tuple[int, int], rows: int, size: int, log: bool, threads: int) -> None:
    """
    fp32 rows, or with `log` their logarithm.
    """

def store_kv(
    *,
    pool: int,
    block_stride: int,
    blocks: int,
    k: int,
    k_strides: tuple[int, int],
    v: int,
    v_strides: tuple[int, int],
    slots: int,
    tokens: int,
    kv_heads: int,
    block_size: int,
    head_bytes: int,
    threads: int,
) -> None:
    """
    Strides are in bytes, those of k and v (token, head). Raises ValueError for a slot outside of the pool.
    """

def use_huge_pages(address: int, bytes: int) -> None:
    """
    Ask for huge pages behind all pages of this memory. Where the system has none, nothing changes.
    """

def widen(*, dtype: str, x: tuple[int, int], y: tuple[int, int], rows: int, size: int, threads: int) -> None:
    """
    y = x, where x is of `dtype` and y fp32.
    """

INTERLEAVED_INPUTS: int = 32
INTERLEAVED_ROWS: int = 16
