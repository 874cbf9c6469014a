"""Times decode steps by marks on the streams, which are read once the streams have passed them: nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanovllm.device import Mark, Stream
from nanovllm.features.cpu_attention.balance import StepTimes
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.step_plan import LayerPlan


@dataclass(slots=True)
class _Marks:
    observe: Callable[[StepTimes], None]
    host_bytes: int
    cpu_bytes: int
    sampled: int | None  # the layer whose ends are marked; None without CPU attention
    marks: dict[str, Mark] = field(default_factory=dict)


class StepClock:
    """Four marks of a step: its begin and end, and in one layer, another one in each step, the ends of both parts."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._layout = engine.layout
        self._compute = engine.device.compute_stream
        self._step: _Marks | None = None  # that runs now
        self._steps: deque[_Marks] = deque(maxlen=16)  # a step whose marks are never passed is forgotten
        self._count = 0

    def begin_step(self, plans: Sequence[LayerPlan], observe: Callable[[StepTimes], None] | None) -> None:
        """plans: by KV group; observe: is told what the step took, once that is known.

        The first layer with CPU attention is not sampled: the ring is only being filled.
        """
        layouts = self._layout.of_groups
        of_layer = self._layout.groups.of_layer
        host_bytes = 0
        for layout, plan in zip(layouts, plans, strict=True):
            tokens = sum(read.stored_tokens for group in (*plan.ring, *plan.concurrent) for read in group.reads)
            host_bytes += layout.num_readers * layout.token_layer_bytes * tokens
        self._step = None
        if observe is None or not host_bytes:
            return
        layers = [layer for layer, (index, _) in enumerate(of_layer) if plans[index].concurrent]
        layers = layers[1:] or layers
        self._count += 1
        self._step = _Marks(observe, host_bytes, 0, None)
        if layers:
            self._step.sampled = layers[self._count % len(layers)]
            index = of_layer[self._step.sampled][0]
            tokens = sum(group.read_tokens for group in plans[index].concurrent)
            self._step.cpu_bytes = tokens * layouts[index].token_layer_bytes

    def layer_begins(self, layer: int) -> None:
        if self._step is not None and layer == 0:
            self._step.marks["begin"] = self._compute.mark()

    def cpu_part_ends(self, layer: int, stream: Stream) -> None:
        """The layer's CPU attention has been launched on the stream."""
        if self._step is not None and layer == self._step.sampled:
            self._step.marks["cpu"] = stream.mark()

    def device_part_ends(self, layer: int) -> None:
        """The device's own attention has been submitted, and nothing waits for the CPU's yet."""
        if self._step is not None and layer == self._step.sampled:
            self._step.marks["device"] = self._compute.mark()

    def layer_ends(self, layer: int) -> None:
        if self._step is not None and layer == len(self._layout.groups.of_layer) - 1:
            self._step.marks["end"] = self._compute.mark()
            self._steps.append(self._step)
            self._step = None

    def tell(self) -> None:
        """What the steps took that have ended since the last call."""
        while self._steps:
            step = self._steps[0]
            times = {name: mark.seconds() for name, mark in step.marks.items()}
            if None in times.values():
                return
            self._steps.popleft()
            step.observe(_step_times(step, {name: at for name, at in times.items() if at is not None}))


def _step_times(step: _Marks, at: dict[str, float]) -> StepTimes:
    late = at["cpu"] - at["device"] if step.sampled is not None else 0.0
    return StepTimes(at["end"] - at["begin"], step.host_bytes, step.cpu_bytes, late)
