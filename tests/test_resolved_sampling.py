"""Bad words as a tokenizer spells them."""

from __future__ import annotations

from nanovllm.engine.resolved_sampling import SamplingFacts, resolve_sampling
from nanovllm.sampling_params import SamplingParams


class Pieces:
    """A tokenizer of letters, with tokens of their own for a few pieces of text."""

    PIECES = (" cat", "cat", " do", "do")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found = [58] if add_special_tokens else []
        while text:
            piece = next((p for p in self.PIECES if text.startswith(p)), text[0])
            found.append(40 + self.PIECES.index(piece) if piece in self.PIECES else ord(piece) % 32)
            text = text[len(piece) :]
        return found


def test_bad_words_are_those_at_the_start_and_after_a_space() -> None:
    facts = SamplingFacts(60, (), Pieces())  # type: ignore[arg-type]

    def words(*bad_words: str) -> tuple[tuple[int, ...], ...]:
        return resolve_sampling(SamplingParams(bad_words=bad_words), [1], facts).bad_words

    assert words("cat") == ((41,), (40,))
    assert words(" cat") == ((41,), (40,)), "a space before it makes it no other word"
    assert words("dog") == ((43, 7), (42, 7))
    assert words("ab") == ((1, 2),), "with the space a token more: another word in vLLM's eyes"
    assert words("cat", "cat") == words("cat")
