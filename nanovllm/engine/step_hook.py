"""The one hook through which a feature sees the steps of an engine, and has its say in them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nanovllm.data.batch import Batch, Sample
from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.prefix_cache import PrefixHit
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

    def is_ready(self, request: Request) -> bool:
        """As `may_start`, but asked only of a waiting request that is next and has room: False may begin some work."""
        return True

    def may_go_on_after(self, content_hash: bytes) -> bool:
        """Whether a sequence can go on after the tokens of this hash if it has their blocks: a prefix hit may end."""
        return True

    def reach(self, seq: Sequence, begin: int) -> int:
        """Up to which token the hook can fill the blocks of a waiting sequence that has `begin` tokens."""
        return begin

    def admitted(self, seq: Sequence, hit: PrefixHit) -> None:
        """A waiting sequence has the blocks of its next step, the first of them from the prefix cache.

        The hook whose `reach` goes beyond the hit sets `seq.pending`, and fills the blocks up to `seq.num_computed`.
        """

    def started(self, request: Request) -> None:
        """A waiting or a swapped request has the blocks of its next step, and takes sequence slots."""

    def first_run(self, request: Request) -> None:
        """A request runs for the first time. It need not compute the `num_computed` tokens of `computing[0]`."""

    # ---- a step

    def plan_part(self, seq: Sequence) -> None:
        """A long prompt is computed next. The hook may compute its next part instead of the scheduler's chunks.

        Then it takes blocks by `BlockManager.hold_part`, and sets in each batch what the step computes of the part.
        """

    def limit(self, seq: Sequence, tokens: int) -> int:
        """How many of the next `tokens` tokens of a sequence a step may compute."""
        return tokens

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

    def looked_ahead(self, seq: Sequence) -> None:
        """A sequence that looked ahead gives back the blocks beyond its own tokens."""

    # ---- blocks

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the blocks of the parent."""

    def swap_out(self, sequences: Seq[Sequence]) -> bool:
        """Whether all blocks of these sequences may leave for the swap tier. They will if all hooks agree."""
        return True

    def freed(self, seq: Sequence) -> None:
        """A sequence gives up its blocks, which get another content next."""

    def forget(self) -> None:
        """The prefix cache forgets all content."""

    def reset(self, sequences: Seq[Sequence]) -> None:
        """A step has failed or was interrupted: all blocks are forgotten. sequences: all that have not ended."""

    # ---- the engine

    def wait(self, seconds: float) -> None:
        """Nothing can run: wait until what is pending, or what is not ready, may have changed, at most so long."""

    def count(self, metrics: EngineMetrics) -> None:
        """Set the metrics that are its own."""

    def close(self) -> None:
        """Release what it holds. Safe to call twice."""
