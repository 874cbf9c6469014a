"""Types of the compiled module csrc/sgdma.cpp."""

has_cuda: bool

def memcpy_2d_async(
    dst_ptr: int, src_ptr: int, dpitch: int, spitch: int, width: int, height: int, kind: str, stream: int
) -> None: ...
