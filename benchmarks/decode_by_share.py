"""Decode with offload by the share of host blocks that the CPU attends to, and decode with all blocks on the device.

Each engine prefills the prompt once. Then the shares take turns of a few tokens each, in reverse order in every second
round, in the same engine and on the same sequence, whose length hardly changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from benchmarks.engine import Work
from benchmarks.report import mib, print_row
from benchmarks.timing import Spread
from benchmarks.transfers import CpuAttentionUse, predict_transfers
from nanovllm import LLM, SamplingParams
from nanovllm.features.cpu_attention.balance import BalancedShare
from nanovllm.features.cpu_attention.host_blocks import HostBlockAttention
from nanovllm.features.cpu_attention.shares import ONE_PROCESSOR, LayerLoad, cpu_attention_query_len
from nanovllm.memory.budget import TransferCount, blocks_of_share
from nanovllm.memory.layout import KVLayout

AUTOMATIC = "automatic"
BAR = 40  # characters of the longest


class ForcedShare(BalancedShare):
    """A policy that gives the CPU the same share of the blocks in every step."""

    def __init__(self, share: float) -> None:
        super().__init__(ONE_PROCESSOR, 0)
        self.share = share

    def blocks_for_cpu_attention(self, load: LayerLoad) -> int:
        return blocks_of_share(len(load.reads), self.share)


@dataclass(frozen=True, slots=True)
class Turn:
    """Some consecutive tokens of one engine."""

    seconds: float
    tokens: int
    moved: TransferCount
    predicted: TransferCount  # by the formula; for the automatic share, without CPU attention
    for_cpu_attention: int  # blocks that the CPU could have attended to, counted per layer


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The cost of a share. Bytes are per token; rates are in 1e9 bytes per second of the total time."""

    name: str
    token_ms: Spread
    h2d_bytes: int
    cpu_attention_bytes: int
    device_bytes: int  # attended to on the device
    taken: float | None  # share of the host blocks, as counted
    as_predicted: bool

    @property
    def kv_gb_s(self) -> float:
        """All KV that a token attends to."""
        return (self.h2d_bytes + self.cpu_attention_bytes + self.device_bytes) / self.token_ms.median / 1e6


@dataclass(frozen=True, slots=True)
class ByShare:
    """The results, "on device" first."""

    results: list[ShareResult]
    outputs_equal: bool

    @property
    def as_predicted(self) -> bool:
        return all(result.as_predicted for result in self.results)


class Decoding:
    """One sequence in one engine, which is decoded turn by turn."""

    def __init__(self, llm: LLM, work: Work, prompt: list[int], steps: int) -> None:
        self._llm = llm
        self._steps = steps
        stats = llm.kv_stats()
        network = work.shape.network
        self._resident_blocks = stats.resident_blocks
        sizes = (network.num_layers, *network.kv_heads[0], stats.block_size, work.shape.dtype.itemsize)
        self.layout = KVLayout.of(work.kv_cache_dtype, *sizes)
        self._most_tokens = cpu_attention_query_len(network.num_heads, network.kv_heads[0][0])
        params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
        llm.engine.add_request("decode", None, params, prompt)
        self.tokens: list[int] = []
        while not self.tokens:
            self._step()
        self.context_len = len(prompt)

    @property
    def resident_tokens(self) -> int:
        return min(self.context_len, self._resident_blocks * self.layout.block_size)

    def turn(self, share: float | None) -> Turn:
        """share: of the host blocks for CPU attention; None for the engine's own choice."""
        contexts = range(self.context_len, self.context_len + self._steps)
        before = self._llm.kv_stats().transfers
        start = time.perf_counter()
        for _ in contexts:
            self._step()
        seconds = time.perf_counter() - start
        self.context_len = contexts.stop
        moved = self._llm.kv_stats().transfers - before
        whole_blocks = (context // self.layout.block_size - self._resident_blocks for context in contexts)
        for_cpu_attention = self.layout.num_layers * sum(max(0, blocks) for blocks in whole_blocks)
        return Turn(seconds, self._steps, moved, self._predicted(contexts, share), for_cpu_attention)

    def _predicted(self, contexts: range, share: float | None) -> TransferCount:
        cpu_attention = CpuAttentionUse(share, self._most_tokens) if share is not None else None
        steps = (
            predict_transfers(self.layout, self._resident_blocks, context, 1, cpu_attention=cpu_attention)
            for context in contexts
        )
        return sum(steps, TransferCount())

    def _step(self) -> None:
        for output in self._llm.engine.step():
            self.tokens = output.outputs[0].token_ids


def measure_by_share(work: Work, device_share: Fraction, shares: Sequence[float], steps: int, rounds: int) -> ByShare:
    """`steps` tokens for each share and round, after a warm-up turn of each share."""
    turns = len(shares) + 1
    work = replace(work, num_prompts=1, output_len=1 + steps * turns * (rounds + 1))
    (prompt,) = work.shape.prompts(1, work.prompt_len, work.seed)
    with work.open(**work.on_device()) as llm:
        resident = Decoding(llm, work, prompt, steps)
        on_device = [resident.turn(None) for _ in range(turns * (rounds + 1))]
        results = [_result("on device", on_device[turns:], resident, _agrees)]
    with work.open(**work.offloaded(device_share)) as llm:
        offloaded = Decoding(llm, work, prompt, steps)
        by_name = _take_turns(offloaded, _cpu_attention_of(llm), shares, rounds)
    for name, of_name in by_name.items():
        exact = name != AUTOMATIC
        results.append(_result(name, of_name, offloaded, _agrees if exact else _agrees_without_cpu_attention))
    return ByShare(results, resident.tokens == offloaded.tokens)


def show_by_share(by_share: ByShare) -> None:
    """Print a line for each share, with a bar as long as a token takes."""
    longest = max(result.token_ms.median for result in by_share.results)
    print("decode by the share of host blocks that the CPU attends to, per token")
    for result in by_share.results:
        bar = "#" * max(1, round(BAR * result.token_ms.median / longest))
        moved = f"link {mib(result.h2d_bytes)}, CPU {mib(result.cpu_attention_bytes)}, KV at {result.kv_gb_s:.1f} GB/s"
        taken = f" takes {result.taken:.0%}" if result.name == AUTOMATIC and result.taken is not None else ""
        differs = "" if result.as_predicted else "  DIFFERS from the formula"
        print_row(result.name + taken, f"{result.token_ms.median:,.1f} ms", f"{moved}{differs}")
        print_row("", "", bar)
    print_row("tokens", "equal" if by_share.outputs_equal else "DIFFERENT", "on the device and under offload")
    print()


def _cpu_attention_of(llm: LLM) -> HostBlockAttention:
    kv_cache: Any = llm._runner.kv_cache  # type: ignore[union-attr]  # no option forces a share
    cpu_attention = kv_cache.cpu_attention
    assert isinstance(cpu_attention, HostBlockAttention)
    return cpu_attention


def _take_turns(
    offloaded: Decoding, cpu_attention: HostBlockAttention, shares: Sequence[float], rounds: int
) -> dict[str, list[Turn]]:
    automatic = cpu_attention.policy
    turns: dict[str, list[Turn]] = {name: [] for name in (*(f"share {share:g}" for share in shares), AUTOMATIC)}
    ways: list[tuple[str, float | None]] = list(zip(turns, [*shares, None], strict=True))
    for index in range(rounds + 1):
        for name, share in ways if index % 2 == 0 else reversed(ways):
            cpu_attention.policy = automatic if share is None else ForcedShare(share)
            turn = offloaded.turn(share)
            if index > 0:
                turns[name].append(turn)
    return turns


def _agrees(turn: Turn) -> bool:
    return turn.moved == turn.predicted


def _agrees_without_cpu_attention(turn: Turn) -> bool:
    return turn.moved.without_cpu_attention == turn.predicted


def _result(name: str, turns: Sequence[Turn], decoding: Decoding, agrees: Callable[[Turn], bool]) -> ShareResult:
    token_ms = Spread.of(turn.seconds / turn.tokens * 1e3 for turn in turns)
    assert token_ms is not None, "at least one turn counts"
    tokens = sum(turn.tokens for turn in turns)
    moved = sum((turn.moved for turn in turns), TransferCount())
    for_cpu_attention = sum(turn.for_cpu_attention for turn in turns)
    return ShareResult(
        name=name,
        token_ms=token_ms,
        h2d_bytes=moved.h2d_bytes // tokens,
        cpu_attention_bytes=moved.cpu_attention_bytes // tokens,
        device_bytes=decoding.resident_tokens * decoding.layout.token_bytes,
        taken=moved.cpu_attention_blocks / for_cpu_attention if for_cpu_attention else None,
        as_predicted=all(map(agrees, turns)),
    )
