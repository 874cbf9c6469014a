"""Which requests may run, so that the device holds the adapters of all that do."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from nanovllm.data.batch import Adapter, Batch
from nanovllm.engine.input_processor import Adapters
from nanovllm.engine.request import Request, RequestStatus, Sequence
from nanovllm.engine.scheduling_budget import SchedulingBudget
from nanovllm.engine.step_hook import StepHook


class AdapterSlots(StepHook):
    """The running requests have at most `max_loras` adapters. Implements `engine.input_processor.Adapters`."""

    def __init__(self, adapters: Adapters, max_loras: int, most_overtaking: int) -> None:
        """most_overtaking: requests that may overtake one that waits for its adapter."""
        self._adapters = adapters
        self._max_loras = max_loras
        self._most_overtaking = most_overtaking
        self._started: dict[Request, None] = {}  # requests with an adapter that have begun to run, some have ended
        # In the step that is being scheduled:
        self._in_use: set[int] | None = None  # numbers of adapters; None: not counted yet
        self._first_waiting: Request | None = None
        # Of waiting requests: how many later ones were admitted while they waited for an adapter.
        self._num_overtaken: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def find(self, lora_request: object) -> Adapter:
        """The adapter that a request names. Raises RequestError if it cannot be used with the model."""
        return self._adapters.find(lora_request)

    def adapter_of(self, request: Request) -> Adapter | None:
        """The adapter of a request; None if it uses none."""
        adapter: Adapter | None = request.ext.get(self)
        return adapter

    def may_start(self, request: Request) -> bool:
        """Whether the adapter of a request is in use, or can be loaded beside the others.

        Up to `most_overtaking` later requests whose adapters are in use overtake a waiting one; more would make it wait
        for ever. Requests without an adapter always overtake it, since they keep no adapter in use.
        """
        adapter = self.adapter_of(request)
        if adapter is None:
            return True
        in_use = self._numbers_in_use()
        has_slot = adapter.number in in_use or len(in_use) < self._max_loras
        if request.status is RequestStatus.SWAPPED:
            return has_slot
        first = self._first_waiting
        if has_slot and (first is None or self._num_overtaken.get(first, 0) < self._most_overtaking):
            return True
        self._first_waiting = first or request
        return False

    def started(self, request: Request) -> None:
        if (adapter := self.adapter_of(request)) is None:
            return
        self._numbers_in_use().add(adapter.number)
        self._started[request] = None
        if (first := self._first_waiting) is not None:
            self._num_overtaken[first] = self._num_overtaken.get(first, 0) + 1

    def built(self, batch: Batch, sequences: list[Sequence]) -> None:
        """The batch has the adapters of all running requests, also of those that the step does not compute."""
        started = sorted(self._started, key=lambda request: request.order)
        running = [request for request in started if request.status is RequestStatus.RUNNING]
        adapters = {adapter.number: adapter for request in running if (adapter := self.adapter_of(request))}
        batch.adapters = tuple(adapters.values())
        for scheduled, seq in zip(batch.sequences, sequences, strict=True):
            adapter = self.adapter_of(seq.request)
            scheduled.adapter = None if adapter is None else adapter.number

    def planned(self, budget: SchedulingBudget) -> None:
        self.reset()

    def reset(self, sequences: Seq[Sequence] = ()) -> None:
        self._in_use = None
        self._first_waiting = None

    def _numbers_in_use(self) -> set[int]:
        if self._in_use is None:
            holding = (RequestStatus.RUNNING, RequestStatus.PENDING)
            self._started = {request: None for request in self._started if request.status in holding}
            self._in_use = {adapter.number for request in self._started if (adapter := self.adapter_of(request))}
        return self._in_use
