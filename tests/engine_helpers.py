"""An engine on the model of KV content, with named requests and recorded steps. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from block_helpers import check_blocks
from content_model import VOCAB, ContentExecutor

from nanovllm.config import PreemptionMode
from nanovllm.data.batch import Adapter, Batch, ScheduledSequence, StepResult
from nanovllm.data.kv_groups import KVGroups, kv_groups
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.layerwise_scheduler import LayerwiseScheduler
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.resolved_sampling import SamplingFacts
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.features.lora.slots import AdapterSlots
from nanovllm.features.recurrent.states import RecurrentStates
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

BLOCK = 4


def check_budget(batch: Batch, limits: SchedulerLimits) -> None:
    """A step computes at most max_num_batched_tokens tokens in all layers.

    A layer-by-layer prefill may exceed that by half of its last chunk, and always computes one chunk.
    """
    assert 0 < len(batch.sequences) <= limits.max_num_seqs
    assert 0 <= batch.num_tokens <= limits.max_num_batched_tokens
    if batch.layerwise is not None and batch.layerwise.layerwise is not None:
        part = batch.layerwise.layerwise
        left = (limits.max_num_batched_tokens - batch.num_tokens) * limits.num_layers - part.token_layers
        assert part.token_layers > 0
        assert (
            -2 * left <= len(part.layerwise.positions(part.end_layer_chunk - 1))
            or part.end_layer_chunk == part.first_layer_chunk + 1
        )


class WatchedExecutor(ContentExecutor):
    """Records the batches, checks the budgets, and counts 10 h2d and 20 d2h bytes per token."""

    def __init__(
        self, device: int, host: int, limits: SchedulerLimits, groups: KVGroups, swap: int = 0, states: int = 0
    ) -> None:
        super().__init__(device, host, groups, swap, states)
        self.limits = limits
        self.batches: list[Batch] = []
        self.error: BaseException | None = None

    def execute(self, batch: Batch) -> StepResult:
        if self.error is not None:
            error = self.error
            self.error = None
            raise error
        self.batches.append(batch)
        check_budget(batch, self.limits)
        samples = super().execute(batch).samples
        lengths = [len(seq.token_ids) for seq in batch.sequences]
        return StepResult(samples, [10 * n for n in lengths], [20 * n for n in lengths])


class NumberedAdapters:
    """The adapter that a number names is that number."""

    def find(self, lora_request: Any) -> Adapter:
        return Adapter(lora_request, lora_request, Path(), ())


def adapter_salt(adapter: object) -> bytes:
    """What the adapter adds to every KV entry of the model of KV content."""
    return b"" if adapter is None else f"adapter {adapter}".encode()


class Bench:
    """An engine with named requests and recorded steps."""

    def __init__(
        self,
        device: int = 64,
        host: int = 0,
        *,
        max_num_seqs: int = 8,
        budget: int = 24,
        max_model_len: int | None = None,
        eos: Sequence[int] = (),
        caching: bool = True,
        seed: int = 0,
        tokenizer: Any = None,
        swap: int = 0,
        chunk_cap: int = 0,
        mode: PreemptionMode | None = None,
        num_layers: int = 1,
        layerwise_memory: LayerwiseMemory = NO_LAYERWISE,
        block_size: int = BLOCK,
        hash_block_size: int | None = None,
        windows: Sequence[int | None] = (),
        max_loras: int = 0,
        states: tuple[int, int] | None = None,
        edge: int = 1,
    ) -> None:
        groups = kv_groups(windows or (None,) * num_layers, block_size)
        chunk = min(budget, chunk_cap or budget)
        num_layers = len(groups.of_layer)
        self.manager = BlockManager(device, host, groups, caching, swap, hash_block_size, chunk)
        length = max_model_len or self.manager.capacity.max_sequence_tokens
        self.limits = SchedulerLimits(
            max_num_seqs, budget, length, frozenset(eos), chunk_cap, mode, num_layers, layerwise_memory,
            edge=edge,
        )  # fmt: skip
        self.executor = WatchedExecutor(device, host, self.limits, groups, swap, 0 if states is None else states[0])
        slots = AdapterSlots(NumberedAdapters(), max_loras, max_num_seqs) if max_loras else None
        recurrent = None if states is None else RecurrentStates(self.manager, *states)
        layerwise = None
        if layerwise_memory != NO_LAYERWISE:
            layerwise = LayerwiseScheduler(self.manager, self.limits, recurrent)
        self.manager.hooks += [hook for hook in (layerwise, recurrent, slots) if hook is not None]
        sampling = SamplingFacts(VOCAB, frozenset(eos), tokenizer)
        inputs = InputProcessor(self.limits, VOCAB, sampling, seed, self.executor.advise, slots)
        self.engine = LLMEngine(Scheduler(self.limits, self.manager), inputs, self.executor)
        self.names: dict[int, str] = {}
        self.finished: dict[str, RequestOutput] = {}
        self.order: list[str] = []  # names, as they finished

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        priority: int = 0,
        adapter: int | None = None,
        **params: Any,
    ) -> None:
        greedy = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
        self.engine.add_request(name, None, greedy, prompt, priority=priority, lora_request=adapter)

    def tell_histories(self) -> None:
        """Tell the executor which tokens each sequence has."""
        scheduler = self.scheduler
        for request in [*scheduler.waiting, *scheduler.pending, *scheduler.swapped, *scheduler.running]:
            for seq in request.sequences:
                self.names[seq.seq_id] = request.request_id
                self.executor.histories[seq.seq_id] = seq.token_ids
                self.executor.salts[seq.seq_id] = adapter_salt(request.lora_request)

    def step(self) -> list[RequestOutput]:
        self.tell_histories()
        outputs = self.engine.step()
        check_blocks(self.manager)
        for output in outputs:
            if output.finished:
                self.finished[output.request_id] = output
                self.order.append(output.request_id)
        return outputs

    def steps(self, most: int = 500) -> Iterator[list[RequestOutput]]:
        """The outputs of each step, until all requests have finished."""
        for _ in range(most):
            if not self.engine.has_unfinished_requests():
                return
            yield self.step()
        raise AssertionError(f"still unfinished after {most} steps")

    def run(self, most: int = 500) -> dict[str, RequestOutput]:
        """Step until all requests have finished. Returns their final outputs."""
        for _ in self.steps(most):
            pass
        return self.finished

    def chunks(self) -> dict[str, int]:
        """Number of tokens of each sequence in the last step, in batch order."""
        return {self.names[seq.seq_id]: len(seq.token_ids) for seq in self.executor.batches[-1].sequences}

    def rows(self, name: str) -> list[ScheduledSequence]:
        """The sequences of one request in all steps."""
        scheduled = (seq for batch in self.executor.batches for seq in batch.sequences)
        return [seq for seq in scheduled if self.names[seq.seq_id] == name]

    def tokens(self, name: str) -> list[int]:
        return self.finished[name].outputs[0].token_ids

    def reason(self, name: str) -> tuple[str | None, int | str | None]:
        output = self.finished[name].outputs[0]
        return output.finish_reason, output.stop_reason


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, the same for the same arguments."""
    random = Random(seed * 1000 + length)
    return [random.randrange(VOCAB) for _ in range(length)]


def crowd(bench: Bench, lengths: dict[str, int], max_tokens: int = 12) -> None:
    """Requests of one prompt length each; the first in the dict has the highest priority."""
    for priority, (name, length) in enumerate(lengths.items()):
        bench.add(name, prompt_of(length, priority), max_tokens, priority)
