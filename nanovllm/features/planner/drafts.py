"""What speculative decoding makes of a request, with an assumed share of right drafts."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.features.planner.dry_run import NO_MOVES, StepMoves
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.predict import Prediction, StepModel, total
from nanovllm.memory.draft_model import DraftMemory, draft_engine, mtp_memory, sized_draft_engine
from nanovllm.memory.layout import layout_of
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.mtp_spec import mtp_spec
from nanovllm.models.spec import ITEMSIZES, DecoderSpec
from nanovllm.speculative_config import speculative_config

ACCEPTANCE = 0.7  # assumed unless it is said


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """The network that drafts, of `speculative_config`."""

    name: str
    network: Network
    memory: DraftMemory


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """Decode with `count` drafts in every pass, each right with probability `acceptance` if those before it are.

    step: a pass, with those of the draft model.
    """

    count: int
    acceptance: float
    step: Prediction

    @property
    def tokens(self) -> float:
        """Tokens that a pass generates on average: the right drafts before the first wrong one, and one more."""
        return sum(self.acceptance**place for place in range(self.count + 1))

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.step.seconds if self.step.seconds else None


def draft_network(config: EngineConfig, spec: DecoderSpec) -> DraftNetwork | None:
    """The second network that an engine with `config` has, whose own network is `spec`; None without one."""
    if config.speculative_config is None:
        return None
    asked = speculative_config(config.speculative_config)
    if asked.method == "ngram":
        return None
    if asked.method == "mtp":
        from nanovllm.features.speculation.checks import check_mtp_head  # imports torch

        check_mtp_head(config, spec)
        own = mtp_spec(spec)
        dtype = spec.dtype if config.dtype == "auto" else config.dtype
        head = mtp_memory(config, spec, ITEMSIZES[dtype])
        return None if head is None else DraftNetwork("head for drafts", Network(own, dtype), head)
    engine = draft_engine(config, asked)
    own = load_decoder_spec(engine.model)
    engine, longest = sized_draft_engine(engine, own, asked, config.max_model_len or spec.max_model_len)
    network = Network(own, own.dtype if engine.dtype == "auto" else engine.dtype)
    kv_bytes = engine.num_gpu_blocks * layout_of(engine, own, network.itemsize).block_bytes
    memory = DraftMemory("the draft model takes", network.weight_bytes, kv_bytes, longest)
    return DraftNetwork("draft model", network, memory)


def planned_drafts(
    model: StepModel, context_len: int, moves: StepMoves, count: int, acceptance: float, draft: DraftNetwork | None
) -> PlannedDrafts:
    """model: of the engine's own network; context_len, moves: of a decode step of it."""
    parts = [model.decode(context_len, moves, rows=1 + count)]
    if draft is not None:
        own = StepModel(draft.network, model.rates, draft.network.layout(1), ring_slots=0)
        parts += [own.decode(min(context_len, draft.memory.longest - 1), NO_MOVES)] * count
    return PlannedDrafts(count, acceptance, total(parts))
