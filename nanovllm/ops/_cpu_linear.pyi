"""csrc/cpu_linear.cpp. Use it through nanovllm.ops.cpu_linear, which checks its arguments."""

def available() -> bool:
    """Whether this machine has the instructions."""

def few_row_linear(
    *,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    y: int,
    y_stride: int,
    rows: int,
    in_features: int,
    out_features: int,
    sum_block: int,
    threads: int,
) -> None:
    """Addresses of bf16 x, weight, bias (0: none) and y; strides are elements from row to row.

    Raises ValueError for negative sizes, a `sum_block` that cuts vectors, or a machine without the instructions.
    """
