"""Whether a prompt fits; if not, what is in the way, what would have to happen, and the plan as if it had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.features.planner.asked import PlanRequest, in_four_bits, plan_of, spec_of, with_directory
from nanovllm.features.planner.cards import CARDS, Card, cards_above
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.plan import Plan
from nanovllm.features.planner.units import show_bytes
from nanovllm.memory.fitting import extended_with_yarn
from nanovllm.memory.sizing import NoMemoryError
from nanovllm.models.hf_config import read_decoder_spec
from nanovllm.models.spec import ITEMSIZES, DecoderSpec

MOST_MODELS = 3  # that are named in the place of one with too few positions
RANKS = (2, 4, 8)
GB = 10**9
LARGEST = max(card.gpu_mem for card in CARDS)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What would have to happen: engine arguments, or flags of `nanovllm plan` for another machine, or neither."""

    text: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps the prompt from fitting, as if the obstacles before it were lifted; each remedy alone lifts it."""

    text: str
    remedies: Sequence[Remedy]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prompt takes.

    plan, prompt_len: what was asked for, or if that does not fit, what `as_if` says. changes: sets of engine arguments
    that each make it fit. can_run: whether the plan is of this machine and checkpoint, with other arguments at most.
    machine, spec: what was asked for, such as "RTX 4090 (24.0 GB)". arguments: the engine's, that the plan is for.
    """

    plan: Plan
    prompt_len: int
    machine: str
    spec: DecoderSpec
    arguments: Mapping[str, Any] = field(default_factory=dict)
    obstacles: Sequence[Obstacle] = ()
    as_if: Sequence[str] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    can_run: bool = True

    @property
    def fits(self) -> bool:
        return not self.obstacles


def outlook_of(asked: PlanRequest, machine: str, models: Mapping[str, str]) -> Outlook:
    """The outlook for what is asked. Raises ConfigError and ModelError for what contradicts itself or is not read.

    machine: how the asked one is called; models: config files of published models, by name.
    """
    return _Search(with_directory(asked), machine, models).outlook()


class _Search:
    """Lifts one obstacle after the other: positions, a given limit, the device's memory, the memory for KV."""

    def __init__(self, asked: PlanRequest, machine: str, models: Mapping[str, str]) -> None:
        self._first = asked
        self._asked = asked
        self._machine = machine
        self._models = models
        self._obstacles: list[Obstacle] = []
        self._as_if: list[str] = []
        self._can_run = True
        self._spec = spec_of(asked, asked.engine_arguments.get("hf_overrides") or {})

    def outlook(self) -> Outlook:
        if self._asked.prompt_len is not None:
            self._lift_positions(self._asked.prompt_len)
            self._lift_limit(self._asked.prompt_len)
        try:
            plan = plan_of(self._asked)
        except NoMemoryError as error:
            plan = self._on_what_holds_it(error)
        tokens = self._asked.prompt_len or plan.kv.max_model_len
        if not plan.fits(tokens):
            plan, tokens = self._with_room(plan, tokens)
        changes = self._changes(tokens) if self._obstacles else []
        asked = self._machine, self._spec, self._asked.engine_arguments
        return Outlook(plan, tokens, *asked, self._obstacles, self._as_if, changes, self._can_run)

    @property
    def _host(self) -> str:
        size = self._asked.host_memory
        return "" if size is None else f" with {show_bytes(size)} of host memory"

    def _changes(self, tokens: int) -> Sequence[Mapping[str, Any]]:
        """What makes the prompt fit without another machine or checkpoint."""
        try:
            return plan_of(replace(self._first, measure=False)).changes_for(self._first.prompt_len or tokens)
        except ConfigError:
            return []

    def _argue(self, arguments: Mapping[str, Any]) -> PlanRequest:
        """The request with other engine arguments."""
        others = {**self._asked.engine_arguments, **arguments}
        offload = others.pop("enable_cpu_offload", self._asked.enable_cpu_offload)
        return replace(self._asked, engine_arguments=others, enable_cpu_offload=offload)

    # ---- positions and limits

    def _lift_positions(self, tokens: int) -> None:
        spec = self._spec
        overrides = self._asked.engine_arguments.get("hf_overrides") or {}
        if tokens <= spec.max_model_len:
            return
        remedies = [Remedy(f"a prompt of at most {spec.max_model_len:,} tokens")]
        if others := ", ".join(self._longer_models(tokens, spec)):
            remedies.append(Remedy(f"a model with more positions: {others}"))
        found = extended_with_yarn(tokens, spec.yarn_positions, overrides)
        if found is not None:
            change, reach = found
            said = f"YaRN up to {reach:,} positions, which costs some accuracy, of short prompts too"
            remedies.insert(0, Remedy(said, change))
            self._asked = self._argue(change)
            self._as_if.append(f"with YaRN up to {reach:,} positions")
        else:
            self._asked = replace(self._asked, positions=tokens + self._asked.output_len)
            self._as_if.append("as if the positions reached as far as the prompt")
            self._can_run = False
        says = f"The prompt has {tokens:,} tokens, and the model's positions end at {spec.max_model_len:,}."
        says += "" if found else " Its authors describe no RoPE scaling that reaches that far."
        self._obstacles.append(Obstacle(says, remedies))

    def _longer_models(self, tokens: int, spec: DecoderSpec) -> list[str]:
        """Of the published models that have as many positions those nearest in size."""
        known = {name: read_decoder_spec(path) for name, path in self._models.items()}
        longer = [name for name, other in known.items() if other.max_model_len >= tokens]
        return sorted(longer, key=lambda name: abs(log(known[name].num_weights / spec.num_weights)))[:MOST_MODELS]

    def _lift_limit(self, tokens: int) -> None:
        limit = self._asked.engine_arguments.get("max_model_len")
        if limit is None or limit >= tokens:
            return
        change = {"max_model_len": tokens + self._asked.output_len}
        remedies = [Remedy("a higher limit", change), Remedy(f"a prompt of at most {limit:,} tokens")]
        self._obstacles.append(
            Obstacle(f"The prompt has {tokens:,} tokens, and max_model_len={limit:,} is given.", remedies)
        )
        self._asked = self._argue({"max_model_len": None})  # a cache that is too small is the next obstacle
        self._as_if.append(f"with max_model_len={change['max_model_len']:,}")

    # ---- a device that is too small

    def _on_what_holds_it(self, error: NoMemoryError) -> Plan:
        """The plan for the same device and weights in 4 bits if they fit, else for the smallest card that does."""
        spec = self._spec
        packed = replace(self._asked, four_bits=True)
        remedies: list[Remedy] = []
        ways: list[tuple[PlanRequest, Plan, str]] = []  # best last
        here = None
        if spec.quantization is None:
            here = _plan_that_starts(packed)
            size = show_bytes(in_four_bits(spec).weight_bytes(ITEMSIZES[spec.dtype]))
            fits = "fits here" if here else "does not fit here either"
            remedies.append(Remedy(f"a checkpoint with 4-bit weights (GPTQ, AWQ or GGUF): {size}, which {fits}"))
        else:
            remedies.append(
                Remedy(f"no smaller checkpoint: the weights are quantized already ({spec.quantization.name})")
            )
        for request, form in ((self._asked, "as they are"), (packed, "in 4 bits")):
            if request is packed and (here or spec.quantization is not None):
                continue
            card, plan = next(_larger_cards(request), (None, None))
            if card is None or plan is None:
                remedies.append(
                    Remedy(f"for the weights {form} a card with more than {LARGEST // GB} GB: none is known here")
                )
                continue
            says = f"{_called(card)}, the smallest size of card for the weights {form}"
            remedies.append(Remedy(says, machine=f'--gpu "{card.name}"'))
            there = _called(card) + self._host
            ways.append((_on(card, request), plan, f"for the weights {form} on {there}"))
        remedies += self._more_cards()
        if here is not None:
            ways.append((packed, here, f"for 4-bit weights on {self._machine}"))
        if not ways:
            raise ConfigError(f"{error}; {'; '.join(remedy.text for remedy in remedies)}") from None
        self._obstacles.append(Obstacle(f"{str(error)[:1].upper()}{str(error)[1:]}.", remedies))
        self._asked, found, assumed = ways[-1]
        self._as_if.append(assumed)
        self._can_run = False
        return found

    def _more_cards(self) -> Iterator[Remedy]:
        """As few tensor-parallel ranks as suffice."""
        if self._asked.device_memory is None or "tensor_parallel_size" in self._asked.engine_arguments:
            return
        changes = [{"tensor_parallel_size": ranks} for ranks in RANKS]
        for four_bits, form in ((False, ""), (True, ", with weights in 4 bits")):
            for change in changes:
                if _plan_that_starts(replace(self._argue(change), four_bits=four_bits)) is not None:
                    yield Remedy(f"{change['tensor_parallel_size']} such cards{form}", change)
                    return

    # ---- too little memory for K and V

    def _with_room(self, plan: Plan, tokens: int) -> tuple[Plan, int]:
        """A plan that holds the prompt, or the longest that this one holds."""
        sizing = plan.sizing
        longest = plan.kv.max_model_len
        with_output = max(tokens, min(tokens + self._asked.output_len, sizing.model_max_len))
        remedies = [Remedy("other arguments", change) for change in sizing.changes_for(with_output)]
        size = sizing.host_memory_for(with_output)
        given = self._asked.host_memory
        if size is not None and size > (given or 0):
            says = f"{size // GB} GB of host memory for what the device does not hold"
            remedies.insert(0, Remedy(says, machine=f"--enable-cpu-offload --host-mem {size // GB}GB"))
        remedies.append(Remedy(f"a prompt of at most {longest:,} tokens"))
        room = f"{show_bytes(plan.device_kv_bytes)} on the device and {show_bytes(plan.host_kv_bytes)} on the host"
        if given is None and self._asked.device_memory is not None:
            room += ", of which --host-mem says nothing"
        takes = f"The KV cache of {tokens:,} tokens takes up to {show_bytes(sizing.kv_bytes(tokens))}"
        self._obstacles.append(Obstacle(f"{takes}, and there is room for {room}.", remedies))
        for remedy in remedies[:-1]:
            if remedy.machine:
                request = replace(self._argue({"enable_cpu_offload": True}), host_memory=size)
                assumed = f"with {(size or 0) // GB} GB of host memory"
            else:
                request = self._argue(remedy.arguments)
                assumed = f"with {_spelled(remedy.arguments)}"
            if (found := _plan_that_fits(request)) is not None:
                self._can_run &= not remedy.machine
                self._asked = request
                self._as_if.append(assumed)
                return found, tokens
        self._as_if.append(f"for a prompt of {longest:,} tokens, the longest that fits")
        self._can_run = False
        return plan, longest


def _spelled(change: Mapping[str, Any]) -> str:
    return " and ".join(f"{name}={value}" for name, value in change.items())


def _called(card: Card) -> str:
    """Such as `RTX 4090 (24.0 GB)`."""
    return f"{card.name} ({show_bytes(card.gpu_mem)})"


def _on(card: Card, asked: PlanRequest) -> PlanRequest:
    return replace(asked, device_memory=card.gpu_mem, rates={**asked.rates, **card.rates})


def _larger_cards(asked: PlanRequest) -> Iterator[tuple[Card, Plan]]:
    """Larger cards that hold what is asked, the smallest first."""
    for card in cards_above(asked.device_memory or 0):
        if (plan := _plan_that_starts(_on(card, asked))) is not None:
            yield card, plan


def _plan_that_fits(asked: PlanRequest) -> Plan | None:
    """The plan, if the engine takes the prompt."""
    plan = _plan_that_starts(asked)
    return plan if plan is not None and (asked.prompt_len is None or plan.fits(asked.prompt_len)) else None


def _plan_that_starts(asked: PlanRequest) -> Plan | None:
    """The plan, if the engine starts so and takes the prompt, with more host memory where that is not said."""
    try:
        plan = plan_of(asked)
    except ConfigError:
        return None
    if asked.prompt_len is None or plan.fits(asked.prompt_len):
        return plan
    may_grow = asked.host_memory is None and asked.enable_cpu_offload is not False
    return plan if may_grow and plan.sizing.host_memory_for(asked.prompt_len) is not None else None


def four_bit_bytes(network: Network) -> int | None:
    """Bytes of the weights in a 4-bit checkpoint; None if they are quantized already, or divided over ranks."""
    if network.spec.quantization is not None or network.num_ranks > 1:
        return None
    return in_four_bits(network.spec).weight_bytes(network.itemsize)
