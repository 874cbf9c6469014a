"""Copies of equally spaced rows between tensors, over the link or on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

try:
    import nanovllm.comm._sgdma as _sgdma
except ImportError as error:
    raise ImportError(
        f"The extension nanovllm.comm._sgdma could not be imported ({error}): build it with "
        "`pip install .` or `python setup.py build_ext --inplace`."
    ) from error

MAX_PITCH = 2**31 - 1  # cudaDeviceProp::memPitch, the largest pitch that CUDA copies with

# kind -> (device type of dst, device type of src)
_SIDES = {"h2h": ("cpu", "cpu"), "h2d": ("cuda", "cpu"), "d2h": ("cpu", "cuda"), "d2d": ("cuda", "cuda")}


class CopyError(ValueError):
    """A refused copy; no byte has moved."""


def memcpy_2d_async(
    dst: Tensor, src: Tensor, dpitch: int, spitch: int, width: int, height: int, kind: str, stream: int | object = 0
) -> None:
    """Copy `height` rows of `width` bytes from `src` to `dst`.

    Row i is read at `src.data_ptr() + i * spitch` and written at `dst.data_ptr() + i * dpitch`. All sizes are
    in bytes; shapes, strides and dtypes of the tensors are ignored, but rows must stay within the storages.
    A width or height of 0 copies nothing. Rows of dst may be between rows of src if both pitches are equal.

    kind: `"h2h"` copies on the calling thread and is done on return; it takes no stream. `"h2d"`, `"d2h"` and
    `"d2d"` are queued on `stream` (a `torch.cuda.Stream` or a raw handle, 0 for the default stream) through
    cudaMemcpy2DAsync, and both tensors must stay alive until the stream has run the copy.

    Raises CopyError when the arguments break a rule, RuntimeError when CUDA fails or this build has no CUDA.
    """
    copy_pitched(dst, src, dpitch, spitch, width, height, kind, stream, rows_above=None)


def copy_pitched(
    dst: Tensor,
    src: Tensor,
    dpitch: int,
    spitch: int,
    width: int,
    height: int,
    kind: str,
    stream: int | object = 0,
    rows_above: int | None = MAX_PITCH,
    is_known: Callable[[Tensor], bool] | None = None,
) -> int:
    """`memcpy_2d_async` for any pitch: rows with a pitch above `rows_above` are copied one by one, in one call.

    Such a call is cudaMemcpyBatchAsync where toolkit and driver are 12.8 or newer and the stream is not the default
    one. is_known: whether a tensor's memory is already known to be pinned or on its device, which saves a query to
    CUDA. Returns the number of copies: 1, the number of rows, or 0 if nothing was copied.
    """
    _check_sizes(dpitch, spitch, width, height)
    _check_sides(dst, src, kind, is_known)
    handle = _stream_handle(stream, kind, dst, src)
    by_rows = rows_above is not None and max(dpitch, spitch) > rows_above
    for name, pitch in (("dst", dpitch), ("src", spitch)):
        if pitch > MAX_PITCH and not by_rows:
            raise CopyError(f"The pitch of {name} must be at most {MAX_PITCH} bytes (2**31 - 1), got {pitch}.")
    _check_ranges(dst, src, dpitch, spitch, width, height)
    if not width or not height:
        return 0
    dst_ptr = dst.data_ptr()
    src_ptr = src.data_ptr()
    if by_rows:
        dst_rows = [dst_ptr + row * dpitch for row in range(height)]
        src_rows = [src_ptr + row * spitch for row in range(height)]
        return _sgdma.memcpy_batch_async(dst_rows, src_rows, [width] * height, kind, handle)
    _sgdma.memcpy_2d_async(dst_ptr, src_ptr, dpitch, spitch, width, height, kind, handle)
    return 1


def copy_on_host_async(
    dst: Tensor, src: Tensor, dpitch: int, spitch: int, width: int, height: int, stream: int | object
) -> None:
    """An h2h copy of any pitch in the order of `stream`, a CUDA stream.

    A thread of the CUDA driver copies and never waits for the GIL. Both tensors must stay alive until then.
    """
    _check_sizes(dpitch, spitch, width, height)
    _check_sides(dst, src, "h2h")
    handle = _stream_handle(stream, "h2d", dst, src)
    _check_ranges(dst, src, dpitch, spitch, width, height)
    if width and height:
        _sgdma.launch_host_copy(dst.data_ptr(), src.data_ptr(), dpitch, spitch, width, height, handle)


def _check_sizes(dpitch: int, spitch: int, width: int, height: int) -> None:
    for name, value in (("dpitch", dpitch), ("spitch", spitch), ("width", width), ("height", height)):
        if type(value) is not int or value < 0:
            raise CopyError(f"{name} must be an int of at least 0, got {value!r}.")


def _check_ranges(dst: Tensor, src: Tensor, dpitch: int, spitch: int, width: int, height: int) -> None:
    """Refuse rows outside their storage, and rows of dst that overlap rows of src."""
    dst_ptr = dst.data_ptr()
    src_ptr = src.data_ptr()
    dst_end = dst_ptr + _checked_range("dst", dst, dpitch, width, height)
    src_end = src_ptr + _checked_range("src", src, spitch, width, height)
    if not width or not height:
        return
    interleaved = height > 1 and dpitch == spitch and width <= (dst_ptr - src_ptr) % dpitch <= dpitch - width
    if dst_ptr < src_end and src_ptr < dst_end and not interleaved:
        raise CopyError(
            f"dst and src must not overlap, but dst spans bytes [{dst_ptr:#x}, {dst_end:#x}) and src "
            f"[{src_ptr:#x}, {src_end:#x})."
        )


def _check_sides(dst: Tensor, src: Tensor, kind: str, is_known: Callable[[Tensor], bool] | None = None) -> None:
    """Refuse arguments that are not strided tensors, an unknown kind, and memory on the wrong side for the kind."""
    sides = _SIDES.get(kind) if isinstance(kind, str) else None
    if sides is None:
        raise CopyError(f"kind must be one of {', '.join(_SIDES)}, got {kind!r}.")
    for name, tensor, side in (("dst", dst, sides[0]), ("src", src, sides[1])):
        if not isinstance(tensor, Tensor):
            raise CopyError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise CopyError(f"{name} must be a strided tensor, got layout {tensor.layout}.")
        if tensor.device.type != side:
            raise CopyError(f"A {kind} copy needs {name} on {side}, but it is on {tensor.device}.")
        if kind != "h2h" and not (is_known is not None and is_known(tensor)):
            _check_memory(name, tensor, kind)


def _check_memory(name: str, tensor: Tensor, kind: str) -> None:
    """Ask CUDA whether both ends of the storage are pinned memory, or memory of the tensor's device."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    size = storage.nbytes()
    for address in (start, start + size - 1) if size else ():
        memory, device = _sgdma.memory_of(address)
        # Through pageable memory CUDA copies synchronously, at a fraction of the link's rate.
        if tensor.device.type == "cpu" and memory != "pinned":
            raise CopyError(f"A {kind} copy needs {name} in pinned host memory, but its memory is {memory}.")
        if tensor.device.type == "cuda" and (memory, device) != ("device", tensor.device.index):
            raise CopyError(
                f"A {kind} copy needs {name} in memory of {tensor.device}, but CUDA says that it is {memory} memory "
                f"of device {device}."
            )


def _stream_handle(stream: object, kind: str, *tensors: Tensor) -> int:
    """The raw handle of `stream`, which must belong to the device of the copy."""
    handle = stream if type(stream) is int else getattr(stream, "cuda_stream", None)
    if kind == "h2h" and handle != 0:
        raise CopyError(f"An h2h copy runs on the calling thread, so stream must be 0, got {stream!r}.")
    if type(handle) is not int or handle < 0:
        raise CopyError(f"stream must be a torch.cuda.Stream or its handle, an int of at least 0, got {stream!r}.")
    if kind != "h2h":
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        devices |= {stream.device} if isinstance(stream, torch.cuda.Stream) else set()
        if len(devices) > 1:
            names = " and ".join(sorted(str(device) for device in devices))
            raise CopyError(f"A {kind} copy and its stream belong to one device, but these are on {names}.")
    return handle


def _checked_range(name: str, tensor: Tensor, pitch: int, width: int, height: int) -> int:
    """The number of bytes from the first to the last byte of the copy in `tensor`. Raises if they leave its storage."""
    if height > 1 and pitch < width:
        raise CopyError(f"The pitch of {name} must be at least the width of {width} bytes, got {pitch}.")
    if not width or not height:
        return 0
    extent = (height - 1) * pitch + width
    storage = tensor.untyped_storage()
    start = tensor.data_ptr()
    # An empty tensor has address 0 whatever its storage.
    available = storage.data_ptr() + storage.nbytes() - start if start else 0
    if extent > available:
        raise CopyError(
            f"The copy would run past the end of {name}: {height} rows of {width} bytes at pitch {pitch} "
            f"span {extent} bytes, but its storage has {available} bytes from there on."
        )
    return extent
