"""Copies between tensors over the link or on the host: equally spaced rows in one call, or a batch of pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    dst: Tensor,
    src: Tensor,
    dpitch: int,
    spitch: int,
    width: int,
    height: int,
    kind: str,
    stream: int | object = 0,
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
    """`memcpy_2d_async` for any pitch: rows with a pitch above `rows_above` are copied as a batch.

    is_known: whether a tensor's memory is already known to be pinned or on its device, which saves a query to CUDA.
    Returns the number of copies: 1, the result of `memcpy_batch_async`, or 0 if nothing was copied.
    """
    _check_sizes(dpitch, spitch, width, height)
    _check_sides(dst, src, kind, "", set(), is_known)
    handle = _stream_handle(stream, kind, dst, src)
    by_rows = rows_above is not None and max(dpitch, spitch) > rows_above
    if not by_rows:
        _check_pitches(dpitch, spitch)
    _check_ranges(dst, src, dpitch, spitch, width, height)
    if not width or not height:
        return 0
    dst_ptr, src_ptr = dst.data_ptr(), src.data_ptr()
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
    _check_sides(dst, src, "h2h", "", set())
    handle = _stream_handle(stream, "h2d", dst, src)
    _check_ranges(dst, src, dpitch, spitch, width, height)
    if width and height:
        _sgdma.launch_host_copy(dst.data_ptr(), src.data_ptr(), dpitch, spitch, width, height, handle)


def memcpy_batch_async(
    dsts: Sequence[Tensor], srcs: Sequence[Tensor], sizes: Sequence[int], kind: str, stream: int | object = 0
) -> int:
    """Copy the first `sizes[i]` bytes of `srcs[i]` to `dsts[i]`, for all i and in any order, in one call.

    Consecutive entries that are adjacent in both memories become one copy; returns the number of remaining copies.
    kind, stream, lifetimes and errors are those of `memcpy_2d_async`. CUDA gets the whole batch at once
    (cudaMemcpyBatchAsync) where toolkit and driver are 12.8 or newer and the stream is not the default one, else copy
    by copy. Written memory must not overlap any other memory of the batch.
    """
    if not len(dsts) == len(srcs) == len(sizes):
        raise CopyError(f"dsts, srcs and sizes must be of one length, got {len(dsts)}, {len(srcs)} and {len(sizes)}.")
    asked: set[int] = set()
    for index, (dst, src, size) in enumerate(zip(dsts, srcs, sizes, strict=True)):
        number = f"s[{index}]"
        if type(size) is not int or size < 0:
            raise CopyError(f"size{number} must be an int of at least 0, got {size!r}.")
        _check_sides(dst, src, kind, number, asked)
        _checked_range("dst" + number, dst, size, size, 1)
        _checked_range("src" + number, src, size, size, 1)
    if not sizes:
        return 0
    handle = _stream_handle(stream, kind, *dsts, *srcs)
    dst_ptrs, src_ptrs = [dst.data_ptr() for dst in dsts], [src.data_ptr() for src in srcs]
    _check_disjoint(dst_ptrs, src_ptrs, sizes)
    return _sgdma.memcpy_batch_async(dst_ptrs, src_ptrs, sizes, kind, handle)


def _check_sizes(dpitch: int, spitch: int, width: int, height: int) -> None:
    for name, value in (("dpitch", dpitch), ("spitch", spitch), ("width", width), ("height", height)):
        if type(value) is not int or value < 0:
            raise CopyError(f"{name} must be an int of at least 0, got {value!r}.")


def _check_pitches(dpitch: int, spitch: int) -> None:
    for name, pitch in (("dst", dpitch), ("src", spitch)):
        if pitch > MAX_PITCH:
            raise CopyError(f"The pitch of {name} must be at most {MAX_PITCH} bytes (2**31 - 1), got {pitch}.")


def _check_ranges(dst: Tensor, src: Tensor, dpitch: int, spitch: int, width: int, height: int) -> None:
    """Refuse rows outside their storage, and rows of dst that overlap rows of src."""
    dst_ptr, src_ptr = dst.data_ptr(), src.data_ptr()
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


def _check_sides(
    dst: Tensor,
    src: Tensor,
    kind: str,
    number: str,
    asked: set[int],
    is_known: Callable[[Tensor], bool] | None = None,
) -> None:
    """Refuse arguments that are not strided tensors, an unknown kind, and memory on the wrong side for the kind.

    asked: addresses of storages for which this call has queried CUDA.
    """
    sides = _SIDES.get(kind) if isinstance(kind, str) else None
    if sides is None:
        raise CopyError(f"kind must be one of {', '.join(_SIDES)}, got {kind!r}.")
    for name, tensor, side in (("dst", dst, sides[0]), ("src", src, sides[1])):
        if not isinstance(tensor, Tensor):
            raise CopyError(f"{name}{number} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise CopyError(f"{name}{number} must be a strided tensor, got layout {tensor.layout}.")
        if tensor.device.type != side:
            raise CopyError(f"A {kind} copy needs {name}{number} on {side}, but it is on {tensor.device}.")
        if kind != "h2h" and not (is_known is not None and is_known(tensor)):
            _check_memory(name + number, tensor, kind, asked)


def _check_memory(name: str, tensor: Tensor, kind: str, asked: set[int]) -> None:
    """Ask CUDA whether both ends of the storage are pinned memory, or memory of the tensor's device."""
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    if not size or start in asked:
        return
    asked.add(start)
    for address in (start, start + size - 1):
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
    if type(handle) is not int or handle < 0 or (handle and kind == "h2h"):
        raise CopyError(_stream_rule(stream, kind))
    if kind != "h2h":
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        devices |= {stream.device} if isinstance(stream, torch.cuda.Stream) else set()
        if len(devices) > 1:
            found = " and ".join(sorted(str(device) for device in devices))
            raise CopyError(f"A {kind} copy and its stream belong to one device, but these are on {found}.")
    return handle


def _checked_range(name: str, tensor: Tensor, pitch: int, width: int, height: int) -> int:
    """The number of bytes from the first to the last byte of the copy in `tensor`. Raises if they leave its storage."""
    if height > 1 and pitch < width:
        raise CopyError(f"The pitch of {name} must be at least the width of {width} bytes, got {pitch}.")
    if not width or not height:
        return 0
    extent = (height - 1) * pitch + width
    storage, start = tensor.untyped_storage(), tensor.data_ptr()
    # An empty tensor has address 0 whatever its storage.
    available = storage.data_ptr() + storage.nbytes() - start if start else 0
    if extent > available:
        raise CopyError(
            f"The copy would run past the end of {name}: {height} rows of {width} bytes at pitch {pitch} "
            f"span {extent} bytes, but its storage has {available} bytes from there on."
        )
    return extent


def _check_disjoint(dst_ptrs: Sequence[int], src_ptrs: Sequence[int], sizes: Sequence[int]) -> None:
    """Refuse a batch in which a copy reads or writes memory that another of its copies writes."""
    ranges = [(start, size, True, f"dsts[{i}]") for i, (start, size) in enumerate(zip(dst_ptrs, sizes, strict=True))]
    ranges += [(start, size, False, f"srcs[{i}]") for i, (start, size) in enumerate(zip(src_ptrs, sizes, strict=True))]
    written_end, written_name = 0, ""
    read_end, read_name = 0, ""
    for start, size, written, name in sorted(each for each in ranges if each[1]):
        if start < written_end or (written and start < read_end):
            other = written_name if start < written_end else read_name
            raise CopyError(f"The copies of a batch must not overlap, but {name} and {other} do, at {start:#x}.")
        if written:
            written_end, written_name = start + size, name
        elif start + size > read_end:
            read_end, read_name = start + size, name


def _stream_rule(stream: object, kind: str) -> str:
    if kind == "h2h":
        return f"An h2h copy runs on the calling thread, so stream must be 0, got {stream!r}."
    return f"stream must be a torch.cuda.Stream or its handle, an int of at least 0, got {stream!r}."
