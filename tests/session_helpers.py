"""Sessions on an engine without a network: scheduler, blocks and states are real, answers are random. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from block_helpers import check_blocks, check_states
from content_model import VOCAB
from engine_helpers import Bench

from benchmarks.session_patterns import PATTERNS, Asked, Player, Talk, Tokens
from nanovllm.data.batch import Batch, Sample, SamplingRow, StepResult
from nanovllm.sampling_params import SamplingParams

BLOCK = 256
CHUNK = 2048
CACHE = 51_200  # tokens, of each KV group
# Of each kind of model the windows of its layers, and whether it has recurrent layers too.
MODELS: dict[str, tuple[tuple[int | None, ...], bool]] = {
    "full attention": ((None, None), False),
    "windows of 128 in half of the layers": ((128, None), False),
    "windows of 512 in five layers of six": ((512,) * 5 + (None,), False),
    "recurrent layers": ((None,), True),
    "windows and recurrent layers": ((512,) * 3 + (None,), True),
}


class RandomAnswers:
    """An executor that computes nothing: a token is drawn from the seed of its request and its own number."""

    def execute(self, batch: Batch) -> StepResult:
        zeros = [0] * len(batch.sequences)
        return StepResult([[_draw(row) for row in seq.samples] for seq in batch.sequences], zeros, zeros)

    def advise(self, num_tokens: int) -> str:
        return "shorten the prompt"

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        pass


def _draw(row: SamplingRow) -> Sample:
    return Sample(Random(f"{row.seed} {row.index}").randrange(VOCAB))


class SessionBench:
    """An engine that answers the prompts of sessions."""

    def __init__(
        self,
        windows: Sequence[int | None],
        is_recurrent: bool,
        *,
        offload: bool = False,
        tokens: int = CACHE,
        states: tuple[int, int] = (192, 192),
        answer: int = 30,
    ) -> None:
        """tokens: that the cache holds of each KV group. states: slots on the device and on the host."""
        num_groups = len(Bench(windows=windows, block_size=BLOCK).manager.groups)
        blocks = tokens // BLOCK * num_groups
        sizes = (8 * num_groups, blocks) if offload else (blocks, 0)
        slots = states if is_recurrent else None
        self.bench = Bench(*sizes, windows=windows, block_size=BLOCK, states=slots, budget=CHUNK)
        self.bench.engine.executor = RandomAnswers()
        self._answer = answer
        self._count = 0

    def ask(self, prompt: Tokens, most: int | None = None) -> tuple[Tokens, int]:
        """A random answer, and how many tokens of the prompt were cached."""
        self._count += 1
        engine = self.bench.engine
        length = self._answer if most is None else most
        params = SamplingParams(temperature=1.0, seed=self._count, max_tokens=length, ignore_eos=True)
        engine.add_request(str(self._count), None, params, prompt)
        while True:
            for output in engine.step():
                if output.finished:
                    check_blocks(self.bench.manager)
                    check_states(self.bench.manager, ())
                    return output.outputs[0].token_ids, output.num_cached_tokens

    def play(self, talk: Talk, between: int = 0) -> Iterator[tuple[str, list[Asked]]]:
        """The requests of each pattern, one after the other. between: tokens of an unrelated prompt before each."""
        player = Player(self.ask)
        for name, pattern in PATTERNS.items():

            def interrupt(number: int, name: str = name) -> None:
                if between:
                    self.ask(talk.words(between, f"between {name} {number}"), 1)

            yield name, player.play(pattern(talk, name), interrupt)
