"""The plan: what an engine allocates, the longest prompt that fits, and the memory, copies and time of one prompt.

It is for an engine that exists, for this machine, or for the one that the flags of `nanovllm plan` describe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, engine_config
from nanovllm.data.batch import LayerwisePrefill
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.errors import ConfigError, RequestError
from nanovllm.features.cpu_attention.shares import can_attend_concurrently
from nanovllm.features.planner.drafts import (
    ACCEPTANCE,
    DraftNetwork,
    PlannedDrafts,
    draft_network,
    planned_drafts,
)
from nanovllm.features.planner.dry_run import StepMoves, dry_run
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.predict import Prediction, Rates, StepModel, total
from nanovllm.formats.hub import find_directory, is_gguf
from nanovllm.memory.adapters import without_adapters
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import layerwise_token_bytes
from nanovllm.memory.layout import layout_of
from nanovllm.memory.shares import with_device_bytes
from nanovllm.memory.sizing import (
    KVPlan,
    MemoryFacts,
    check_step_fits,
    longest_sequence,
    needs_activation_peak,
    smallest,
)
from nanovllm.memory.states import without_states
from nanovllm.models.hf_config import read_decoder_spec
from nanovllm.rules import share_of

if TYPE_CHECKING:
    from nanovllm.features.planner.measure import LocalMachine

HOST_SIZES = ("num_cpu_blocks", "kv_offloading_size")  # engine arguments that only offload has
MAX_DECODE_SAMPLES = 64  # contexts at which the decode time of a long output is computed


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One prompt that fits, alone in the engine. `output_len` is cut at the longest sequence.

    cpu_attention_bytes: KV that the CPU attends to in a decode step, on average; None if it is unknown.
    no_cpu_attention: the rates that are missing for it. Transfers and times are then without CPU attention.
    """

    prompt_len: int
    output_len: int
    num_blocks: int
    kv_bytes: int  # of all computed tokens, all but the last output token, as far as a layer still sees them
    resident_bytes: int  # of kv_bytes, what stays on the device; the rest is streamed
    prefill_transfers: TransferCount
    decode_transfers: TransferCount  # of all output tokens after the first
    prefill: Prediction
    decode: Prediction  # of one token, on average
    layer_by_layer: int  # tokens of the prompt that are prefilled layer by layer
    cpu_attention_bytes: float | None
    no_cpu_attention: tuple[str, ...]
    drafts: PlannedDrafts | None = None  # with speculative decoding

    @property
    def streamed_bytes(self) -> int:
        return self.kv_bytes - self.resident_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine on a machine. `kv` is what `LLM` with the same arguments allocates.

    draft: the second network of speculative decoding. acceptance: the share of right drafts that is assumed.
    """

    network: Network
    sizing: KVSizing
    rates: Rates
    kv: KVPlan
    draft: DraftNetwork | None = None
    acceptance: float = ACCEPTANCE

    @property
    def chunk(self) -> int:
        """Prompt tokens in a step."""
        return self.sizing.config.max_num_batched_tokens

    @property
    def device_kv_bytes(self) -> int:
        """Resident blocks and ring."""
        layout, split = self.sizing.layout, self.kv.split
        return split.resident_blocks * layout.block_bytes + split.ring_slots * layout.block_layer_bytes

    @property
    def host_kv_bytes(self) -> int:
        return self.kv.num_cpu_blocks * self.sizing.layout.block_bytes

    @property
    def device_tokens(self) -> int:
        """The longest sequence whose KV stays on the device."""
        groups = self.sizing.layout.groups
        return min(self._any_length, groups.longest_sequence(self.kv.split.resident_blocks, self.sizing.config.chunk))

    @property
    def _any_length(self) -> int:
        """Tokens to name where memory does not limit the length of a sequence."""
        return self.sizing.model_max_len if all(group.window for group in self.sizing.layout.groups) else ANY_LENGTH

    @property
    def cache_tokens(self) -> int:
        """The longest sequence that device and host hold together."""
        sizing = self.sizing
        longest = longest_sequence(sizing.config, sizing.layout, self.kv.num_sequence_blocks, sizing.watermark)
        return min(self._any_length, longest)

    @property
    def cpu_attention(self) -> bool:
        """Whether the CPU attends to a share of the host blocks."""
        can = self.sizing.memory.tiers_share_memory or all(map(can_attend_concurrently, self.sizing.layout.head_dims))
        return can and self.sizing.config.cpu_attention and self.kv.num_cpu_blocks > 0

    @property
    def hiding_chunk(self) -> int | None:
        """The smallest chunk, in query tokens, for which attention to a streamed block takes as long as its copy.

        Attention takes 4 * q_size operations for each query and key, the copy the bytes of a key and a value.
        """
        link, attention = self.rates.link, self.rates.attention
        if link is None or attention is None:
            return None
        layout = self.sizing.layout.of_groups[0]  # of layers with full attention, if there are such
        q_size = self.network.spec.num_heads * layout.head_dim
        return -int(-attention * layout.token_layer_bytes // (4 * q_size * link.h2d))

    def fits(self, prompt_len: int) -> bool:
        """Whether the engine accepts the prompt."""
        return prompt_len <= self.kv.max_model_len

    def changes_for(self, prompt_len: int) -> list[dict[str, Any]]:
        """Engine arguments each set of which makes the prompt fit; see `KVSizing.changes_for`."""
        return self.sizing.changes_for(prompt_len)

    def request(self, prompt_len: int, output_len: int) -> RequestPlan:
        """One prompt that fits. Raises RequestError for another, and if nothing comes out."""
        if not 0 < prompt_len <= self.kv.max_model_len or output_len < 1:
            given = f"prompt_len={prompt_len}, output_len={output_len}"
            raise RequestError(f"{given}: plan 1 to {self.kv.max_model_len} tokens in, and at least 1 out")
        output_len = min(output_len, max(1, self.kv.max_model_len - prompt_len))
        model = self._step_model
        planned = self._steps(model, prompt_len, output_len)
        steps = [each for each in planned.steps if each[0].begin < prompt_len]
        decodes = planned.steps[len(steps) :]
        shown = decodes or [planned.next_token]
        return RequestPlan(
            prompt_len=prompt_len,
            output_len=output_len,
            num_blocks=planned.num_blocks,
            kv_bytes=planned.kv_bytes,
            resident_bytes=planned.resident_bytes,
            prefill_transfers=sum((moves.transfers for _, moves in steps), TransferCount()),
            decode_transfers=sum((moves.transfers for _, moves in decodes), TransferCount()),
            prefill=total([model.prefill(step, step.end == prompt_len, moves) for step, moves in steps]),
            layer_by_layer=sum(step.end - step.begin for step, _ in steps if step.num_chunks > 1),
            decode=_mean_decode(model, shown),
            cpu_attention_bytes=None
            if model.no_cpu_attention
            else sum(moves.transfers.cpu_attention_bytes for _, moves in shown) / len(shown),
            no_cpu_attention=model.no_cpu_attention,
            drafts=self._drafts(model, shown),
        )

    def _drafts(self, model: StepModel, decodes: Sequence[PlannedStep]) -> PlannedDrafts | None:
        """Decode with drafts, in the middle of the output."""
        count = self.sizing.config.num_speculative_tokens
        if not count:
            return None
        work, moves = decodes[len(decodes) // 2]
        return planned_drafts(model, work.begin, moves, count, self.acceptance, self.draft)

    @property
    def _step_model(self) -> StepModel:
        return StepModel(
            self.network,
            self.rates,
            self.sizing.layout,
            self.kv.split.ring_slots,
            cpu_attention=self.cpu_attention,
            one_processor=self.sizing.memory.tiers_share_memory,
        )

    def _steps(self, model: StepModel, prompt_len: int, output_len: int) -> PlannedSteps:
        """The steps that the engine's scheduler takes."""
        layout, resident = self.sizing.layout, self.kv.split.resident_blocks
        steps: list[PlannedStep] = []
        states = self.sizing.memory.states
        for scheduled in dry_run(self.sizing.config, layout, self.kv, states, prompt_len, output_len):
            work, last = scheduled.work, scheduled
            share = model.share_of if scheduled.seq.layerwise is None and model.can_share(last.query_len) else None
            moves = scheduled.moved(layout, resident, share)
            if steps and steps[-1][0] == work:  # a further part of a layer-by-layer prefill
                moves += steps.pop()[1]
            steps.append((work, moves))
        end = last.again()
        kv_bytes, resident_bytes = end.seen(layout, resident)
        moves = end.moved(layout, resident, model.share_of if model.can_share(1) else None)
        num_blocks = sum(block != HOLE for table in end.seq.block_tables for block in table)
        return PlannedSteps(steps, (end.work, moves), num_blocks, kv_bytes, resident_bytes)


PlannedStep = tuple[LayerwisePrefill, StepMoves]  # what is computed, a single token too, and what that moves


@dataclass(frozen=True, slots=True)
class PlannedSteps:
    """The steps of a request alone, and what it holds at its end. next_token: one more step, of one token."""

    steps: list[PlannedStep]
    next_token: PlannedStep
    num_blocks: int
    kv_bytes: int
    resident_bytes: int


def _mean_decode(model: StepModel, steps: Sequence[PlannedStep]) -> Prediction:
    """The mean over steps. Evenly spaced samples are enough for many, since time is almost linear in the context."""
    step = -(-len(steps) // MAX_DECODE_SAMPLES)
    sampled = [model.decode(work.begin, moves) for work, moves in steps[step // 2 :: step]]
    summed = total(sampled)
    if summed.seconds is None:
        return summed
    count = len(sampled)
    return Prediction(summed.seconds / count, {name: seconds / count for name, seconds in summed.terms.items()})


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned.

    model: a config, a model directory, a GGUF file or a hub name. prompt_len: None for the longest that fits.
    enable_cpu_offload: None if the prompt needs it. device_memory, host_memory: bytes; without device_memory the plan
    is for this machine. rates: `Rates` that are given; the others are measured if `measure` is set and the plan is for
    this machine. acceptance: the share of right drafts that speculative decoding is planned with.
    """

    model: str
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt_len: int | None = None
    output_len: int = 128
    enable_cpu_offload: bool | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    rates: Mapping[str, Any] = field(default_factory=dict)
    measure: bool = True
    acceptance: float = ACCEPTANCE


def plan_of(asked: PlanRequest) -> Plan:
    """The plan that is asked for. Raises ConfigError and ModelError."""
    if not Path(asked.model).is_file():  # a config or a GGUF file
        asked = replace(asked, model=str(find_directory("model", asked.model, content="config")))
    offload = asked.enable_cpu_offload
    if offload is None and any(name in asked.engine_arguments for name in HOST_SIZES):
        offload = True
    config = _config(asked, bool(offload))
    spec = read_decoder_spec(asked.model, config.hf_overrides)
    if config.tensor_parallel_size > 1:
        spec = max(spec.of_ranks(config.tensor_parallel_size), key=lambda part: part.num_weights)
    network = Network(spec, spec.dtype if config.dtype == "auto" else config.dtype, config.kv_cache_dtype)
    if asked.device_memory is not None:
        return _plan(asked, network, config, None)
    if asked.host_memory is not None:
        raise ConfigError("--host-mem needs --gpu-mem: without it, the plan is for this machine's memory")
    from nanovllm.features.planner.measure import local_machine

    with local_machine(network) as machine:
        return _plan(asked, network, config, machine)


def _config(asked: PlanRequest, offload: bool) -> EngineConfig:
    arguments = dict(asked.engine_arguments)
    if not offload and asked.enable_cpu_offload is None:
        arguments.pop("cpu_attention", None)  # only applies to offload
    if asked.prompt_len and (given := arguments.get("kv_cache_memory_bytes")) is not None:
        arguments["kv_cache_memory_bytes"] = share_of(given, asked.prompt_len + asked.output_len)
    path = Path(asked.model)
    is_config = path.is_file() and not is_gguf(path)
    return engine_config(path.parent if is_config else path, arguments | {"enable_cpu_offload": offload})


def _plan(asked: PlanRequest, network: Network, config: EngineConfig, machine: LocalMachine | None) -> Plan:
    """The plan for `machine`, or if it is None, for the one that is described.

    Where nothing says whether to offload, it is planned if the prompt does not fit the device.
    """
    sizing = _sizing(asked, network, config, machine)
    known = asked.enable_cpu_offload is not None or config.enable_cpu_offload
    if not known and (machine is not None or asked.host_memory is not None):
        wanted = asked.prompt_len + asked.output_len if asked.prompt_len else network.spec.max_model_len
        held = _longest(sizing)
        if held < min(wanted, network.spec.max_model_len):
            offloaded = _sizing(asked, network, _config(asked, offload=True), machine)
            sizing = sizing if held and held > _longest(offloaded) else offloaded
    rates = machine.rates(sizing) if machine is not None and asked.measure else Rates()
    draft = draft_network(config, network.spec)
    return Plan(network, sizing, replace(rates, **asked.rates), sizing.plan(), draft, asked.acceptance)


def _longest(sizing: KVSizing) -> int:
    """Tokens of the longest sequence; 0 if the engine would refuse the configuration."""
    try:
        return sizing.plan().max_model_len
    except ConfigError:
        return 0


def _sizing(asked: PlanRequest, network: Network, config: EngineConfig, machine: LocalMachine | None) -> KVSizing:
    if machine is None and asked.host_memory is None:
        needed = "offloaded KV blocks need it" if config.enable_cpu_offload else "adapters are in host memory too"
        if config.enable_cpu_offload or config.enable_lora:
            raise ConfigError(f"--host-mem is not given, and {needed}: name it, such as --host-mem 256GB")
    spec, itemsize = network.spec, network.itemsize
    config = with_device_bytes(config, spec, itemsize)

    def left(facts: MemoryFacts, config: EngineConfig) -> MemoryFacts:
        """What is left besides all that is allocated before KV blocks are."""
        if (draft := draft_network(config, spec)) is not None:
            facts = draft.memory.without(facts)
        facts = without_adapters(smallest([facts], network.num_ranks), config, spec, itemsize)
        return without_states(facts, config, spec, itemsize)

    facts = _given_memory(asked, network, config) if machine is None else machine.memory(config)
    sizing = KVSizing(
        config,
        layout_of(config, spec, itemsize),
        spec.max_model_len,
        left(facts, config),
        WATERMARK,
        spec.yarn_positions,
    )
    if machine is not None:
        return sizing

    def host_left(host_memory: int) -> int:
        try:
            return left(replace(facts, host_free=host_memory), config).host_free
        except ConfigError:  # it does not hold the adapters
            return 0

    def memory_of(config: EngineConfig) -> MemoryFacts:
        return left(_given_memory(asked, network, config), config)

    return replace(sizing, memory_of=memory_of, host_left=host_left)


def _given_memory(asked: PlanRequest, network: Network, config: EngineConfig) -> MemoryFacts:
    from nanovllm.features.planner.measure import activation_peak_on_gpu

    weights, gpu_mem = network.weight_bytes, asked.device_memory or 0
    if weights >= gpu_mem:
        raise ConfigError(f"--gpu-mem is {gpu_mem / 1e9:.1f} GB: the weights alone take {weights / 1e9:.1f} GB")
    check_step_fits(network.spec, network.itemsize, config, gpu_mem - weights)
    return MemoryFacts(
        device_total=gpu_mem,
        device_free=gpu_mem - weights,
        host_free=asked.host_memory or 0,
        tiers_share_memory=False,
        activation_peak=activation_peak_on_gpu(network, config) if needs_activation_peak(config) else 0,
        layerwise_token_bytes=layerwise_token_bytes(network.spec, network.itemsize, config),
    )
