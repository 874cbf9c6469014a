"""csrc/cpu_kernels.cpp. Use it through nanovllm.ops.cpu_kernels, which checks arguments.

Addresses are ints, or pairs with the stride from row to row in elements (of store_kv: in bytes). `dtype` is "bfloat16",
"float16" or "float32"; `isa` is one of `instruction_sets()`; `activation` is "silu", "gelu_tanh" or "clamped_swiglu".
"""

from collections.abc import Sequence

_Address = tuple[int, int]
_NormAddress = tuple[int, bool]  # and whether the weights are fp32; address 0: no norm

def instruction_sets() -> list[str]:
    """Instruction sets that this machine runs, best first; ValueError if NANOVLLM_CPU_ISA names another."""

def linear(
    *,
    isa: str,
    dtype: str,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    y: int,
    y_stride: int,
    rows: int,
    in_features: int,
    out_features: int,
    interleaved: bool,
    threads: int,
) -> None:
    """Addresses of x, weight, bias (0: none) and y. Raises ValueError for negative sizes."""

INTERLEAVED_ROWS: int
INTERLEAVED_INPUTS: int

def interleave(*, dtype: str, weight: int, out_features: int, in_features: int, back: bool, threads: int) -> None:
    """Reorder a weight in place for `interleaved=True`, or back. Raises ValueError for sizes that do not fit."""

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
    """Rows of a dense weight. Raises IndexError for an index outside of it."""

def copy(*, x: _Address, y: _Address, rows: int, row_bytes: int, threads: int) -> None:
    """Strides are in bytes."""

def use_huge_pages(address: int, bytes: int) -> None:
    """Ask for huge pages behind this memory, all pages that it touches; where there are none, nothing changes."""

def rms_norm(
    *,
    dtype: str,
    x: _Address,
    addend: _Address,
    weight: _NormAddress,
    y: _Address,
    rows: int,
    size: int,
    eps: float,
    threads: int,
) -> None:
    """`addend` at address 0: none; else it is added to x in place before."""

def place_heads(
    *,
    dtype: str,
    heads: _Address,
    weight: _NormAddress,
    cos: _Address,
    sin: _Address,
    q: _Address,
    k: _Address,
    v: _Address,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    threads: int,
) -> None:
    """Strides are from token to token, a token's heads being contiguous."""

def gated_unit(
    *, dtype: str, activation: str, gate_up: _Address, y: _Address, rows: int, size: int, threads: int
) -> None: ...
def add(*, dtype: str, x: _Address, addend: _Address, rows: int, size: int, threads: int) -> None: ...
def narrow(*, dtype: str, x: _Address, y: _Address, rows: int, size: int, threads: int) -> None:
    """x is fp32; dtype is that of y."""

def widen(*, dtype: str, x: _Address, y: _Address, rows: int, size: int, threads: int) -> None:
    """y is fp32; dtype is that of x."""

def fill(*, x: int, size: int, value: float, threads: int) -> None:
    """fp32."""

def cos_sin(
    *, angles: _Address, cos: _Address, sin: _Address, rows: int, size: int, factor: float, threads: int
) -> None:
    """fp32; cos is twice as wide as the angles."""

def powers(*, bases: int, exponents: int, results: int, rows: int, size: int, threads: int) -> None: ...
def softmax(*, x: _Address, y: _Address, rows: int, size: int, log: bool, threads: int) -> None: ...
def sigmoid(*, x: _Address, y: _Address, rows: int, size: int, threads: int) -> None: ...
def likeliest(*, dtype: str, logits: _Address, tokens: int, rows: int, size: int, threads: int) -> None: ...
def draw(*, scores: _Address, tokens: _Address, starts: int, drawn: int, rows: int, size: int, threads: int) -> None:
    """fp32 scores, int64 tokens, starts and drawn."""

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
    """Strides in bytes, of k and v (token, head). Raises ValueError for a slot outside of the blocks."""

class DeltaSizes:
    def __init__(self, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> None:
        """ValueError for sizes that are not positive, or value heads that are no multiple of key heads."""

class DeltaRuns:
    def __init__(self, *, slots: int, starts: int, of_row: int, count: int, rows: int, num_slots: int) -> None:
        """Addresses of int64. Raises ValueError for a slot that is none of `num_slots`."""

def delta_prepare(
    *,
    dtype: str,
    sizes: DeltaSizes,
    runs: DeltaRuns,
    x: _Address,
    weight: int,
    conv: _Address,
    b: _Address,
    a: _Address,
    rate: int,
    dt_bias: int,
    qk: int,
    v: int,
    decay: int,
    beta: int,
    threads: int,
) -> None:
    """rate, dt_bias, qk, decay and beta are fp32. A row of conv is a slot."""

def delta_recur(
    *,
    dtype: str,
    sizes: DeltaSizes,
    runs: DeltaRuns,
    qk: int,
    v: int,
    decay: int,
    beta: int,
    states: _Address,
    y: int,
    threads: int,
) -> None:
    """qk, decay, beta and states are fp32. A row of states is a slot."""

def gated_norm(
    *,
    dtype: str,
    x: _Address,
    z: _Address,
    weight: int,
    y: _Address,
    rows: int,
    heads: int,
    size: int,
    eps: float,
    threads: int,
) -> None: ...
def gate(*, dtype: str, x: _Address, gate: _Address, rows: int, size: int, threads: int) -> None: ...

class DenseWeight:
    def __init__(self, *, address: int, in_features: int, out_features: int, interleaved: bool) -> None: ...

class Linear:
    def __init__(self, *, parts: list[DenseWeight | PackedWeight], bias: int) -> None:
        """Weights one below the other. ValueError if their inputs differ."""

class Norms:
    def __init__(
        self,
        *,
        input: _NormAddress,
        heads: _NormAddress,
        mlp: _NormAddress,
        attention_output: _NormAddress,
        mlp_output: _NormAddress,
        eps: float,
    ) -> None: ...

class HeadLayout:
    def __init__(self, *, head_dim: int, rotary_dim: int, gated: bool) -> None:
        """ValueError for odd sizes, and for more rotated features than a head has."""

class DeltaWeights:
    def __init__(self, *, sizes: DeltaSizes, conv: int, rate: int, dt_bias: int, norm: int) -> None:
        """rate and dt_bias are fp32, the others in the dtype of the layer."""

class Layer:
    def __init__(
        self,
        *,
        isa: str,
        packed_isa: str,
        dtype: str,
        norms: Norms,
        qkv: Linear,
        o: Linear,
        gate_up: Linear,
        down: Linear,
        heads: HeadLayout,
        activation: str,
    ) -> None: ...
    def recur(
        self,
        weights: DeltaWeights,
        runs: DeltaRuns,
        x: _Address,
        conv: _Address,
        states: _Address,
        projected: _Address,
        y: _Address,
        threads: int,
        /,
    ) -> None: ...
    def project(
        self,
        x: _Address,
        cos: _Address,
        sin: _Address,
        q: _Address,
        k: _Address,
        v: _Address,
        gate: _Address,
        count: int,
        q_heads: int,
        kv_heads: int,
        threads: int,
        /,
    ) -> None: ...
    def finish(self, x: _Address, attended: _Address, count: int, threads: int, /) -> None: ...

class PackedWeight:
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
    ) -> None:
        """Addresses of parts in panels, 0 for scales and zeros that there are not. ValueError for other sizes."""

def packed_linear(
    *, isa: str, dtype: str, x: _Address, weight: PackedWeight, bias: int, y: _Address, rows: int, threads: int
) -> None:
    """`bias` 0: none. Raises ValueError for a negative number of rows, or no threads."""

# ---- attention, through nanovllm.ops.cpu_attention

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
