"""csrc/cpu_kernels.cpp. Use it through nanovllm.ops.cpu_kernels, which checks arguments.

Addresses are ints, or pairs with the stride from row to row in elements (of store_kv: in bytes). `dtype` is "bfloat16",
"float16" or "float32"; `isa` is one of `instruction_sets()`; `activation` is "silu", "gelu_tanh" or "clamped_swiglu".
"""

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
    interleaved: bool = False,
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
    def __init__(self, *, address: int, in_features: int, out_features: int, interleaved: bool = False) -> None: ...

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
        head_dim: int,
        activation: str,
    ) -> None: ...
    def project(
        self,
        x: _Address,
        cos: _Address,
        sin: _Address,
        q: _Address,
        k: _Address,
        v: _Address,
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
