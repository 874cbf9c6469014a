"""Libraries with dense attention that prefill uses where they are right: FlashAttention 3 and 4, and cuDNN.

None of them has been measured within the engine yet. On an H200 torch's attention, which took cuDNN, ran at 607 to 665
TFLOP/s on contiguous tensors, this package's own kernel at 446 to 450, and torch's FlashAttention 2 (the one that
`torch.nn.attention.varlen` calls too) at 304 to 307: that one is not offered. The variable NANOVLLM_PREFILL_LIBRARY
names another choice, see `chosen_library`.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from nanovllm.errors import ConfigError, quoted
from nanovllm.ops.attention import AttentionBackend, RowAttention
from nanovllm.ops.flash_attention import flash_attn_3
from nanovllm.ops.segment_attention import LEAST_ROWS, SEGMENT, Library, SegmentAttention

logger = logging.getLogger(__name__)

VARIABLE = "NANOVLLM_PREFILL_LIBRARY"
OWN = "triton"
CHECK_BOUND = 2e-2  # largest error of output and LSE against fp64, for inputs of size 1
CHECKED_ROWS = 65  # of a call, from the first to the last

Shape = tuple[int, int, int]  # heads, KV heads, head_dim


# ---- the libraries


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's operator, since its public function gives no LSE. Its causal mask is aligned top-left: only squares.

    It plans for every shape and stride, in each thread anew.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, True, 0.0, causal, False, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return flash_attn_3(q, k.transpose(0, 1), v.transpose(0, 1), scale, -1, 0 if causal else -1)


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The package flash-attn-4, which returns the LSE on request."""
    from flash_attn.cute import flash_attn_func

    asked = {"return_lse": True} if "return_lse" in inspect.signature(flash_attn_func).parameters else {}
    out, lse, *_ = flash_attn_func(
        q.unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0), softmax_scale=scale,
        causal=causal, **asked,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)


CUDNN = (Library("cuDNN", cudnn), Library("cuDNN with expanded heads", cudnn, groups=False))
LIBRARIES = {
    "flash-attn-3": (Library("flash-attn 3", flash_attention_3, any_rows=True),),
    "flash-attn-4": (Library("flash-attn 4", flash_attention_4, any_rows=True),),
    "cudnn": CUDNN,
}
# By the major compute capability, the preferred first; other GPUs keep the Triton kernel unless the variable names one.
PREFERRED = {9: ("flash-attn-3", "cudnn", "flash-attn-4"), 10: ("flash-attn-4", "cudnn")}


def installed(name: str) -> bool:
    if name == "flash-attn-3":
        return find_spec("flash_attn_interface") is not None
    if name == "flash-attn-4":
        return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
    return torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()


# ---- the choice


def faster_prefill(
    backend: AttentionBackend, device: torch.device, shapes: Iterable[Shape], dtype: torch.dtype, rows: int
) -> AttentionBackend:
    """`backend`, with whole segments through the first library that is right on this device; else as it is.

    shapes: (heads, KV heads, head_dim) of the layers without a window, as this rank has them; dtype: of the queries;
    rows: the most of a step. Only the Triton kernels, which attend everything else, are given a library. To be called
    on the thread that runs the steps, since plans are made for a thread.
    """
    names, segment = chosen_library(os.environ.get(VARIABLE, ""), device)
    if not names or rows < segment or dtype == torch.float32 or not isinstance(backend, RowAttention):
        return backend
    for library in (library for name in names if installed(name) for library in LIBRARIES[name]):
        right = [shape for shape in sorted(set(shapes)) if is_right(library, device, shape, dtype, segment)]
        if right:
            return SegmentAttention(library, backend, right, rows, segment)
    return backend


def chosen_library(setting: str, device: torch.device) -> tuple[Sequence[str], int]:
    """(names of libraries, segment) by the variable: NAME or NAME:SEGMENT, such as "cudnn" or "cudnn:16384".

    "triton" is none, "flash-attn-3", "flash-attn-4" and "cudnn" that one, "auto" and "" those of the device.
    """
    name, _, tokens = setting.partition(":")
    if name not in (*LIBRARIES, OWN, "auto", "") or (tokens and not (tokens.isdecimal() and int(tokens))):
        raise ConfigError(
            f"{VARIABLE}={quoted(setting)}: must be {', '.join(LIBRARIES)}, {OWN} or auto, with the tokens of a segment"
            f" after a colon if wanted, such as cudnn:{SEGMENT}"
        )
    segment = int(tokens) if tokens else SEGMENT
    if name == OWN or device.type != "cuda":
        return (), segment
    if name in LIBRARIES:
        return (name,), segment
    return PREFERRED.get(torch.cuda.get_device_capability(device)[0], ()), segment


@cache
def is_right(library: Library, device: torch.device, shape: Shape, dtype: torch.dtype, segment: int) -> bool:
    """Whether the library agrees with fp64 at the shapes that it will get; a warning says why not."""
    heads, kv_heads, head_dim = shape
    where = f"{heads} heads of {head_dim} with {kv_heads} KV heads"
    try:
        difference = difference_from_fp64(library, device, shape, dtype, segment)
    except Exception as error:  # a library built for another torch or GPU may fail in any way
        logger.warning("%s does not attend %s because it fails: %s", library.name, where, error)
        return False
    if difference > CHECK_BOUND:
        logger.warning("%s does not attend %s because its error is %g", library.name, where, difference)
    return difference <= CHECK_BOUND


def difference_from_fp64(
    library: Library, device: torch.device, shape: Shape, dtype: torch.dtype, segment: int
) -> float:
    """Largest error of output or LSE in some rows of every head, in the calls that prefill makes; NaN is infinite."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(segment, heads, head_dim, generator=generator, device=device).to(dtype)
    k, v = torch.randn(2, kv_heads, segment, head_dim, generator=generator, device=device).to(dtype)
    if not library.groups:
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    calls = [(segment, segment, True), (segment, segment, False)]
    if library.any_rows:
        some = min(LEAST_ROWS, segment)
        calls += [(some, segment - segment // 8, True), (some, segment, False), (some, some, True)]
    worst = 0.0
    for rows, keys, causal in calls:
        out, lse = library.attend(q[:rows], k[:, :keys], v[:, :keys], head_dim**-0.5, causal)
        if not (torch.isfinite(out).all() and torch.isfinite(lse).all()):
            return float("inf")
        at = torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS)).long().to(device)
        last = at + keys - rows if causal else torch.full_like(at, keys - 1)
        for head in range(heads):
            of = head * k.shape[0] // heads
            scores = q[at, head].double() @ k[of, :keys].double().T * head_dim**-0.5
            scores.masked_fill_(torch.arange(keys, device=device) > last[:, None], float("-inf"))
            error = (out[at, head] - scores.softmax(-1) @ v[of, :keys].double()).abs().max()
            worst = max(worst, float(error), float((lse[head, at] - scores.logsumexp(-1)).abs().max()))
    return worst
