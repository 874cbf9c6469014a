"""Pitched copies between tensors: many equally spaced rows in one call, on the host or over the link."""

from __future__ import annotations

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
    """A copy that is refused before a byte has moved."""


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
    in bytes; shapes, strides and dtypes of the tensors play no part, only where their storages begin and end.
    A width or height of 0 copies nothing. Rows of dst may lie between those of src if both pitches are the same.

    kind: `"h2h"` copies on the calling thread and is done on return; it takes no stream. `"h2d"`, `"d2h"` and
    `"d2d"` are queued on `stream` (a `torch.cuda.Stream` or a raw handle, 0 for the default stream) through
    cudaMemcpy2DAsync, and both tensors must live until that stream has passed the copy.

    Raises CopyError when the arguments break a rule, RuntimeError when CUDA fails or this build has no CUDA.
    """
    for name, value in (("dpitch", dpitch), ("spitch", spitch), ("width", width), ("height", height)):
        if type(value) is not int or value < 0:
            raise CopyError(f"{name} must be an int of at least 0, got {value!r}.")
    _check_sides(dst, src, kind)
    handle = stream if type(stream) is int else getattr(stream, "cuda_stream", None)
    if type(handle) is not int or handle < 0 or (handle and kind == "h2h"):
        raise CopyError(_stream_rule(stream, kind))
    dst_ptr, src_ptr = dst.data_ptr(), src.data_ptr()
    dst_end = _checked_end("dst", dst, dst_ptr, dpitch, width, height)
    src_end = _checked_end("src", src, src_ptr, spitch, width, height)
    if not width or not height:
        return
    interleaved = height > 1 and dpitch == spitch and width <= (dst_ptr - src_ptr) % dpitch <= dpitch - width
    if dst_ptr < src_end and src_ptr < dst_end and not interleaved:
        raise CopyError(
            f"dst and src must not overlap, but dst spans bytes [{dst_ptr:#x}, {dst_end:#x}) and src "
            f"[{src_ptr:#x}, {src_end:#x})."
        )
    _sgdma.memcpy_2d_async(dst_ptr, src_ptr, dpitch, spitch, width, height, kind, handle)


def _check_sides(dst: Tensor, src: Tensor, kind: str) -> None:
    """Refuse what is no plain tensor, an unknown kind, and tensors on other devices than the kind says."""
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
        # Through pageable memory CUDA copies synchronously, at a fraction of the link's rate.
        if side == "cpu" and kind != "h2h" and not tensor.is_pinned():
            raise CopyError(f"A {kind} copy needs {name} in pinned host memory, but its memory is pageable.")


def _checked_end(name: str, tensor: Tensor, start: int, pitch: int, width: int, height: int) -> int:
    """The address one past the last byte that the copy touches in `tensor`, known to lie in its storage."""
    if pitch > MAX_PITCH:
        raise CopyError(f"The pitch of {name} must be at most {MAX_PITCH} bytes (2**31 - 1), got {pitch}.")
    if height > 1 and pitch < width:
        raise CopyError(f"The pitch of {name} must be at least the width of {width} bytes, got {pitch}.")
    if not width or not height:
        return start
    span = (height - 1) * pitch + width
    storage = tensor.untyped_storage()
    # An empty tensor has address 0 whatever its storage.
    room = storage.data_ptr() + storage.nbytes() - start if start else 0
    if span > room:
        raise CopyError(
            f"The copy would run past the end of {name}: {height} rows of {width} bytes at pitch {pitch} "
            f"span {span} bytes, but its storage has {room} bytes from there on."
        )
    return start + span


def _stream_rule(stream: object, kind: str) -> str:
    if kind == "h2h":
        return f"An h2h copy runs on the calling thread, so stream must be 0, got {stream!r}."
    return f"stream must be a torch.cuda.Stream or its handle, an int of at least 0, got {stream!r}."
