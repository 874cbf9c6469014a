"""Engines on the emulated GPU with one wait of `transfer_order` less, and with all of them: what a race does to logits.

The ordering check on the CPU (`tests/test_ordering.py`) finds the same waits by what the work declares. Here nothing is
declared: the work runs on streams of its own, some of it late, and a missing wait has to show in the logits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import emulated_gpu
import pytest
import torch
from checkpoints import checkpoint_fixture
from cpu_attention_helpers import force_share
from engines import greedy, offloaded, random_prompt, recorded_logits, run_random_requests, set_prefill, set_ring
from test_ordering import (
    MIXTURE,
    STREAMED,
    forget_cache,
    in_every_step,
    is_cpu_attention,
    is_of_weights,
    order_calls,
    without_call,
)
from torch import Tensor

from nanovllm import LLM, build
from nanovllm.device import PitchedCopy, create_device
from nanovllm.device.cuda import CudaDevice, CudaStream
from nanovllm.engine import prefix_cache
from nanovllm.errors import EngineError
from nanovllm.features.streamed_weights import stream
from nanovllm.kvcache import pools

BLOCK = 16
VOCAB = 97
ENGINES = ((2, 4, 14), (8, 9, 9))  # slots of the ring, num_gpu_blocks, num_cpu_blocks
SEEDS = (1, 2, 3, 4)
SHARES = (None, 1.0)  # of the host blocks for CPU attention
# The longest random time that each piece of work waits before it runs, in microseconds.
LATE = {"host_tasks": 6000, "copies": 6000, "stores": 60_000, "kernels": 300}
WAITS = [call for call in in_every_step(order_calls()) if ".wait(" in call[2]]


model_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=32, head_dim=16)
mixture_dir = checkpoint_fixture(**MIXTURE)


@pytest.fixture(scope="module")
def known() -> dict[Any, list[Tensor]]:
    """The logits of engines with all waits, in which nothing is late."""
    return {}


@pytest.fixture(autouse=True)
def plain_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without the ordering check and without Triton, whose prefix cache finds parts of blocks."""
    monkeypatch.setattr(prefix_cache, "hash_block_size_of", lambda _: 4)
    monkeypatch.setattr(build, "create_device", create_device)


@contextmanager
def late(kind: str | None, seed: int) -> Iterator[None]:
    """In this context the work of a kind is late; `stores` are copies of new KV to the host, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "stores":
            random = Random(seed)
            copy_2d = CudaDevice.copy_2d

            def copy_late(device: CudaDevice, copy: PitchedCopy, stream: Any) -> int:
                assert isinstance(stream, CudaStream)
                if copy.kind == "d2h" and stream.name == "kv-stores":
                    seconds = random.uniform(0, LATE["stores"] / 1e6)
                    emulated_gpu.push(stream.inner.cuda_stream, lambda: time.sleep(seconds))
                return copy_2d(device, copy, stream)

            patch.setattr(CudaDevice, "copy_2d", copy_late)
        delays = {} if kind in (None, "stores") else {kind: LATE[kind]}
        with emulated_gpu.delays(seed, **delays):
            yield


def logits_of(
    model_dir: Path,
    sizes: tuple[int, int, int],
    share: float | None,
    kind: str | None = None,
    seed: int = 0,
    **others: Any,
) -> list[Tensor]:
    """The logits of all steps up to one that fails. sizes: see ENGINES; share: see SHARES; others: engine arguments."""
    ring_slots, *blocks = sizes
    arguments = offloaded(BLOCK, *blocks, max_num_batched_tokens=45, cpu_attention=share is not None)
    arguments |= {"dtype": "float32", "device": "cuda", "enforce_eager": True, "max_model_len": 120, **others}
    with pytest.MonkeyPatch.context() as patch:
        set_ring(patch, ring_slots)
        llm = LLM(model_dir, **arguments)
    with llm, recorded_logits(llm) as logits, late(kind, seed):
        if share is not None:
            force_share(llm, share)
        try:
            crowd(llm)
            partial_hits(llm)
        except EngineError:
            logits.append(torch.full((1,), torch.nan))  # equal to nothing
        return [logit.cpu() for logit in logits]


def crowd(llm: LLM) -> None:
    """Requests that come, are aborted, and are preempted by those that came before."""
    run_random_requests(llm, VOCAB, 12, longest=6)


def partial_hits(llm: LLM) -> None:
    """A step that samples nothing, for which the host therefore does not wait, and a block moved right after it: the
    second prompt begins like the first, whose second block it copies in part."""
    set_prefill(llm, "chunk-major")
    for index in range(4):
        first = random_prompt(60, VOCAB, 100 + index)
        llm.engine.add_request(f"first {index}", None, greedy(2), first)
        llm.engine.step()
        llm.engine.add_request(f"second {index}", None, greedy(2), first[:28] + random_prompt(20, VOCAB, index))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def known_logits(model_dir: Path, known: dict[Any, list[Tensor]], sizes: Any, share: float | None) -> list[Tensor]:
    if (sizes, share) not in known:
        known[sizes, share] = logits_of(model_dir, sizes, share)
    return known[sizes, share]


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sizes", ENGINES)
def test_late_work_does_not_change_the_logits(
    model_dir: Path, known: dict[Any, list[Tensor]], sizes: tuple[int, int, int], share: float | None, kind: str
) -> None:
    expected = known_logits(model_dir, known, sizes, share)
    assert len(expected) > 20 and all(bool(each.isfinite().all()) for each in expected)
    assert all(equal(logits_of(model_dir, sizes, share, kind, seed), expected) for seed in SEEDS[:2])


@pytest.mark.parametrize("kind", LATE)
def test_late_weights_do_not_change_the_logits(model_dir: Path, known: dict[Any, list[Tensor]], kind: str) -> None:
    expected = known_logits(model_dir, known, ENGINES[0], None)
    assert all(equal(logits_of(model_dir, ENGINES[0], None, kind, seed, **STREAMED), expected) for seed in SEEDS[:2])


def chosen_logits(path: Path, kind: str | None = None, seed: int = 0, **others: Any) -> list[Tensor]:
    """The logits of requests that run alone and choose experts, in all steps up to one that fails."""
    arguments = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 20, "max_model_len": 120, **others}
    llm = LLM(path, dtype="float32", device="cuda", enforce_eager=True, **arguments)
    with llm, recorded_logits(llm) as logits, late(kind, seed):
        for index in range(3):
            llm.generate([random_prompt(2, VOCAB, index)], greedy(4), use_tqdm=False)
        return [logit.cpu() for logit in logits]


@pytest.mark.parametrize("has_wait", [True, False])
def test_experts_are_used_after_their_copies_to_the_cache(
    mixture_dir: Path, has_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the cache follow its last use without a wait too: the host has the router's choice, which is later."""
    expected = chosen_logits(mixture_dir)
    if not has_wait:
        forget_cache(monkeypatch, "before_compute")
    tries = [chosen_logits(mixture_dir, kind, seed, **STREAMED) for kind in LATE for seed in SEEDS[:2]]
    assert all(equal(logits, expected) for logits in tries) == has_wait


@pytest.mark.parametrize(("line", "column", "source"), WAITS, ids=lambda value: str(value))
def test_a_missing_wait_changes_the_logits(
    model_dir: Path,
    known: dict[Any, list[Tensor]],
    line: int,
    column: int,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For some kind of late work and some seed."""
    share = 1.0 if is_cpu_attention(source) else None
    expected = {sizes: known_logits(model_dir, known, sizes, share) for sizes in ENGINES}
    mutant = without_call(line, column)
    monkeypatch.setattr(pools, "TransferOrder", mutant.TransferOrder)
    monkeypatch.setattr(stream, "WeightOrder", mutant.WeightOrder)
    others = STREAMED if is_of_weights(source) else {}
    tries = [(sizes, kind, seed) for seed in SEEDS for kind in LATE for sizes in ENGINES]
    assert not all(
        equal(logits_of(model_dir, sizes, share, kind, seed, **others), expected[sizes]) for sizes, kind, seed in tries
    ), source
