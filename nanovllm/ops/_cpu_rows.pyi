"""csrc/cpu_rows.cpp. Use it through nanovllm.ops.cpu_rows, which checks its arguments.

Addresses are ints, or pairs with the stride from row to row in elements (of store_kv: in bytes).
"""

def rms_norm(
    *,
    x: tuple[int, int],
    addend: tuple[int, int],
    weight: int,
    y: tuple[int, int],
    rows: int,
    size: int,
    eps: float,
    threads: int,
) -> None:
    """`addend` at address 0: none; else it is added to x in place before."""

def place_heads(
    *,
    heads: tuple[int, int],
    weight: int,
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
    """`weight` 0: no norm. Strides are from token to token, a token's heads being contiguous."""

def silu_and_mul(*, gate_up: tuple[int, int], y: tuple[int, int], rows: int, size: int, threads: int) -> None: ...
def silu(*, x: tuple[int, int], y: tuple[int, int], rows: int, size: int, threads: int) -> None: ...
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
