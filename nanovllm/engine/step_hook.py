"""The one hook through which a feature sees the steps of an engine, and has its say in them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanovllm.data.batch import Batch, Sample
from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.request import Request, Sequence
from nanovllm.engine.scheduling_budget import SchedulingBudget


class StepHook:
    """What a feature overrides. By default each method changes nothing.

    `BlockManager.hooks` are called in their order. What a hook keeps of a request or of a sequence is in its `ext`,
    with the hook as the key.
    """

    # ---- a request begins to run

    def may_start(self, request: Request) -> bool:
        """Whether a waiting or a swapped request may run. Later requests overtake a waiting one that may not."""
        return True

    def started(self, request: Request) -> None:
        """A waiting or a swapped request has the blocks of its next step."""

    # ---- a step

    def planned(self, budget: SchedulingBudget) -> None:
        """The chunks of a step are chosen. None may be, and then there is no step."""

    def built(self, batch: Batch, sequences: list[Sequence]) -> None:
        """The batch of a step, in which the hook sets what is its own. sequences: those of `batch.sequences`."""

    def executed(self, batch: Batch, seconds: float) -> None:
        """The step has taken so long. Its results come next."""

    def computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        """The tokens of a sequence from `begin` to `seq.num_computed` are computed, and still have all their blocks.

        samples: all that the step drew after them, none of them appended. Of a sequence that looked ahead, it is called
        again before each further one is appended.
        """

    # ---- the end

    def count(self, metrics: EngineMetrics) -> None:
        """Set the metrics that are its own."""

    def reset(self) -> None:
        """A step has failed, or was interrupted: all blocks are forgotten."""

    def close(self) -> None:
        """Release what it holds. Safe to call twice."""
