"""A model that writes what a test says, through the whole engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from nanovllm.data.batch import Batch, Sample, StepResult
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.text.tokenizer import HuggingFaceTokenizer


@dataclass
class Script:
    """text: what the next answers are. stop: the token that ends them."""

    tokenizer: HuggingFaceTokenizer
    stop: int
    text: str = ""

    def answered(self, batch: Batch, result: StepResult) -> StepResult:
        """The result with the script's tokens in place of those that were drawn."""
        tokens = [*self.tokenizer.encode(self.text, add_special_tokens=False), self.stop]
        for sequence, samples in zip(batch.sequences, result.samples, strict=True):
            written = sequence.context_len + len(sequence.token_ids) - sequence.prompt_len
            for i in range(len(samples)):
                samples[i] = Sample(tokens[min(written + i, len(tokens) - 1)])
        return result


def write_by(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model writes the script's text from now on."""
    execute = ModelRunner.execute

    def scripted(self: ModelRunner, batch: Batch) -> StepResult:
        return script.answered(batch, execute(self, batch))

    monkeypatch.setattr(ModelRunner, "execute", scripted)
