"""csrc/cpu_attention.cpp. Use it through nanovllm.ops.cpu_attention, which checks its arguments."""

def attend(
    *,
    isa: str,
    dtype: str,
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
