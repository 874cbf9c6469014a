"""Triton's launches on the emulated GPU: a kernel is compiled for it and launched, which checks the launch. Then the
stream's thread computes what the kernel would, over the memory of the device: by a stand-in of torch's operators, or in
Triton's interpreter."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import emulated_gpu

# The interpreter replaces functions of the language while it runs, which a compilation must not see.
_language = threading.RLock()
_thread = threading.local()  # `scopes`: the modules whose names of the language are replaced, while a kernel runs
# What computes the launches in place of the stand-in: a function of (kernel, arguments, grid, options).
_computes: list[Callable[[Any, list[Any], Any, dict[str, Any]], None]] = []


def install(jit: ModuleType) -> None:
    import torch

    launch = jit.JITFunction.run
    call = jit.JITFunction.__call__

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = _compiled_and_launched(launch, self, args, grid, warmup, kwargs)
        if not warmup and any(isinstance(each, torch.Tensor) and each.is_cuda for each in [*args, *kwargs.values()]):
            aliases = [_argument(each) for each in args]
            options = {name: _argument(each) for name, each in kwargs.items()}
            size = grid(_bound(self, aliases, options)) if callable(grid) else grid
            stream = torch.cuda.current_stream().cuda_stream
            compute = _computes[-1] if _computes else stand_in
            emulated_gpu.push(stream, lambda: compute(self, aliases, size, options))
        return compiled

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        scopes = getattr(_thread, "scopes", None)
        if scopes is None:
            return call(self, *args, **kwargs)
        if self.fn.__module__ not in scopes:
            scopes[self.fn.__module__] = _interpreter()._patch_lang(self.fn)
        return _interpreted(self).rewrite()(*args, **kwargs)

    jit.JITFunction.run = run
    jit.JITFunction.__call__ = called


@contextmanager
def computed_by(compute: Callable[[Any, list[Any], Any, dict[str, Any]], None]) -> Iterator[None]:
    """Launches in this context are computed by this function."""
    _computes.append(compute)
    try:
        yield
    finally:
        _computes.remove(compute)


class _Collections:
    """Turns collections off while any thread is within: what they finalize may wait for the stream of this thread, or
    for one whose thread waits for the language. With a GPU no Python runs on such threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._enabled = gc.isenabled()
                gc.disable()
            self._within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._within -= 1
            if self._enabled and not self._within:
                gc.enable()


_no_collections = _Collections()


def _compiled_and_launched(launch: Any, kernel: Any, args: Any, grid: Any, warmup: bool, kwargs: Any) -> Any:
    with _language, _no_collections:
        return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)


def stand_in(kernel: Any, args: list[Any], grid: Any, options: dict[str, Any]) -> None:
    """Compute a launch by the stand-in of its kernel, or interpret it if there is none."""
    import torch
    from stand_ins import STAND_INS

    compute = STAND_INS.get(kernel.fn.__name__)
    if compute is None:
        interpret(kernel, args, grid, options)
        return
    arguments = SimpleNamespace(**_bound(kernel, args, options), grid=(*grid, 1, 1)[:3])
    with _no_collections, torch.inference_mode():
        compute(arguments)


def interpret(kernel: Any, args: list[Any], grid: Any, options: dict[str, Any]) -> None:
    import torch

    with _language, _no_collections, torch.inference_mode():
        _thread.scopes = {kernel.fn.__module__: _interpreter()._patch_lang(kernel.fn)}
        try:
            _interpreted(kernel).run(*args, grid=grid, warmup=False, **options)
        finally:
            scopes = _thread.scopes
            _thread.scopes = None
            for scope in reversed(list(scopes.values())):
                scope.restore()


def _argument(value: Any) -> Any:
    import torch

    return emulated_gpu.cpu_alias(value) if isinstance(value, torch.Tensor) and value.is_cuda else value


def _bound(kernel: Any, args: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(kernel.fn)
    known = {name: value for name, value in options.items() if name in parameters.parameters}
    bound = parameters.bind_partial(*args, **known)
    bound.apply_defaults()
    return bound.arguments


def _interpreted(kernel: Any) -> Any:
    if not hasattr(kernel, "emulated"):  # kept there, since a kernel's hash reads its source
        kernel.emulated = _interpreter().InterpretedFunction(kernel.fn)
    return kernel.emulated


@cache
def _interpreter() -> ModuleType:
    """Triton's interpreter, without copies of the arguments, and with right bf16."""
    from triton.runtime import interpreter

    from benchmarks import interpreted_ptx

    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    interpreter.GridExecutor._restore_args_dev = lambda self, *rest: None
    _right_bf16(interpreter)
    interpreted_ptx.install()
    return interpreter


def _right_bf16(interpreter: ModuleType) -> None:
    """The interpreter computes with the bits of bf16 tiles, and cuts fp32 off where it should round."""
    import numpy as np
    import torch
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast = builder.cast_impl
    dot = builder.create_dot
    convert = builder.create_fp_to_fp

    def widened(value: Any) -> Any:
        bits = np.ascontiguousarray(value.data).astype(np.uint32) << 16
        return handle(bits.view(np.float32).reshape(np.shape(value.data)), tl.float32)

    def rounded(value: Any) -> Any:
        numbers = np.ascontiguousarray(value.data, dtype=np.float32)
        bits = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return handle(bits.reshape(np.shape(value.data)), tl.bfloat16)

    def cast_impl(self: Any, value: Any, target: Any) -> Any:
        source = value.dtype.scalar
        wanted = target.scalar
        if source == wanted == tl.bfloat16:
            return handle(value.data, wanted)
        if source == tl.bfloat16:
            wide = widened(value)
            return wide if wanted == tl.float32 else cast(self, wide, target)
        if wanted == tl.bfloat16:
            return rounded(value)
        return cast(self, value, target)

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *rest: Any) -> Any:
        """Products of 16-bit numbers are exact, and their sums are in fp32."""
        if a.dtype.scalar == tl.bfloat16:
            a = widened(a)
            b = widened(b)
        elif a.data.dtype == np.float16:
            a, b = (handle(each.data.astype(np.float32), tl.float32) for each in (a, b))
        return dot(self, a, b, sums, *rest)

    def create_fp_to_fp(self: Any, value: Any, target: Any, rounding: Any) -> Any:
        source = value.dtype.scalar
        wanted = target.scalar
        plain = (tl.float16, tl.bfloat16, tl.float32)
        if tl.bfloat16 in (source, wanted) and source in plain and wanted in plain:
            return cast_impl(self, value, target)
        return convert(self, value, target, rounding)

    def arithmetic(operation: Any) -> Any:
        """In fp32, rounded once."""

        def create(self: Any, a: Any, b: Any) -> Any:
            if a.dtype.scalar != tl.bfloat16:
                return operation(self, a, b)
            return rounded(operation(self, widened(a), widened(b)))

        return create

    casts = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "int_cast")
    for name in casts:
        setattr(builder, f"create_{name}", lambda self, value, target, *_: self.cast_impl(value, target))
    for name in ("fadd", "fsub", "fmul"):
        setattr(builder, f"create_{name}", arithmetic(getattr(builder, f"create_{name}")))
    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
    builder.create_fp_to_fp = create_fp_to_fp
