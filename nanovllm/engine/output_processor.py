"""The output processor: turns new tokens into what the user reads, text, token ids and log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from nanovllm.data.batch import TokenLogprobs
from nanovllm.engine.detokenizer import SequenceText
from nanovllm.engine.request import Request, Sequence
from nanovllm.errors import told
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, RequestOutputKind
from nanovllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TokenTexts:
    """The text of single tokens, cached. None without a tokenizer, and for tokens that it does not know."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def __getitem__(self, token_id: int) -> str | None:
        if token_id not in self._texts:
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def _text(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        try:
            return self.tokenizer.token_text(token_id)
        except Exception:  # some tokenizers raise for ids that only pad the model's vocabulary
            return None

    def logprobs(self, token_id: int, computed: TokenLogprobs, count: int) -> dict[int, Logprob]:
        """Log-probabilities at one position by token id: the actual token, then the `count` most likely ones."""
        entries = {token_id: Logprob(computed.logprob, computed.rank, self[token_id])}
        rank = 0
        last = float("nan")
        for position, (other, logprob) in enumerate(
            zip(computed.top_token_ids[:count], computed.top_logprobs, strict=False), 1
        ):
            # equal values share the first one's rank
            rank = rank if logprob == last else position
            last = logprob
            entries[other] = Logprob(logprob, rank, self[other])
        return entries


class SequenceOutput:
    """The text and log-probabilities of one sequence, and how much of them earlier outputs have reported.

    text: None without a tokenizer or `detokenize`, and after the tokenizer has failed.
    """

    def __init__(self, seq: Sequence, token_texts: TokenTexts) -> None:
        """Raises what the tokenizer raises for the prompt."""
        self._seq = seq
        self._token_texts = token_texts
        self._logprobs: list[Mapping[int, Logprob]] = []  # of the first output tokens
        self._num_sent_tokens = 0
        self._sent_end = False
        self.text: SequenceText | None = None
        if token_texts.tokenizer is not None:
            self.text = SequenceText(token_texts.tokenizer, seq.params, seq.request.prompt_token_ids)

    def completion(self, *, only_new: bool) -> CompletionOutput | None:
        """Everything so far.

        only_new: what is new since the last call, or None if nothing is. The cost does not grow with the sequence.
        """
        seq = self._seq
        text = self.text
        first = self._num_sent_tokens if only_new else 0
        if only_new and seq.num_output_tokens == first and seq.finished == self._sent_end:
            return None
        self._num_sent_tokens = seq.num_output_tokens
        self._sent_end = seq.finished
        if seq.request.sampling.num_logprobs is not None:
            self._update_logprobs(seq.request.sampling.num_logprobs)
        return CompletionOutput(
            index=seq.index,
            text="" if text is None else text.take() if only_new else text.visible(),
            token_ids=seq.token_ids[seq.prompt_len + first :],
            cumulative_logprob=None if seq.request.num_logprobs is None else seq.cumulative_logprob,
            logprobs=self._logprobs[first:] if seq.params.logprobs is not None else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

    def _update_logprobs(self, count: int) -> None:
        """Add the new tokens' log-probabilities, with the `count` most likely ones."""
        done = len(self._logprobs)
        token_ids = self._seq.token_ids[self._seq.prompt_len + done :]
        for token_id, computed in zip(token_ids, self._seq.logprobs[done:], strict=True):
            self._logprobs.append(self._token_texts.logprobs(token_id, computed, count))


class OutputProcessor:
    """Makes the outputs of one request.

    The request ends with finish_reason "error" if the tokenizer fails, or if an output does not match the structure
    that was asked for. It may report no sequences before it has finished (`Request.outputs`).
    """

    def __init__(self, request: Request, token_texts: TokenTexts) -> None:
        """Raises what the tokenizer raises for the prompt."""
        self.request = request
        self._token_texts = token_texts if request.params.detokenize else TokenTexts(None)
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] = [None]  # of the first prompt tokens
        self._num_sent_prompt_logprobs = 0
        self._sequences: dict[int, SequenceOutput] = {}  # by seq_id
        self._judged: set[int] = set()  # seq_ids
        for seq in request.sequences:
            self._sequences[seq.seq_id] = SequenceOutput(seq, self._token_texts)

    def detokenize(self, seq: Sequence) -> str | None:
        """Decode the new tokens of a sequence. Returns the stop string that they complete, if any.

        Raises what the tokenizer raises, of any type: then call `fail_text`.
        """
        text = self._sequences[seq.seq_id].text
        if text is None or text.num_tokens == seq.num_output_tokens:
            return None
        stop_string = text.append(seq.token_ids[seq.prompt_len + text.num_tokens :], ends=seq.ended_by_token)
        return text.finish() if seq.finished else stop_string

    def fail_text(self, seq: Sequence, error: Exception) -> None:
        """The tokenizer failed: report the error instead of the sequence's text."""
        logger.exception("the text of request %r cannot be made", self.request.request_id)
        self.request.error = f"the text cannot be made: {told(error)}"
        self._sequences[seq.seq_id].text = None
        if seq.finished:
            seq.finish_reason = "error"

    def output(self) -> RequestOutput | None:
        """The output that `output_kind` asks for now; None if it asks for none."""
        request = self.request
        for seq in request.sequences:
            if seq.finished:
                self._finish(seq)
        if request.params.output_kind is RequestOutputKind.FINAL_ONLY and not request.finished:
            return None
        sequences = [self._sequences[seq.seq_id] for seq in request.outputs]
        only_new = request.params.output_kind is RequestOutputKind.DELTA
        completions = [seq.completion(only_new=only_new) for seq in sequences]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion for completion in completions if completion is not None],
            finished=request.finished,
            metrics=request.metrics,
            num_cached_tokens=request.metrics.cached_tokens,
            prompt_logprobs=None if request.params.prompt_logprobs is None else self._new_prompt_logprobs(),
            error=request.error,
            step_failed=request.step_failed,
            lora_request=request.lora_request,
        )

    def _finish(self, seq: Sequence) -> None:
        """Decode what is left of a sequence that has ended."""
        try:
            text = self._sequences[seq.seq_id].text
            if text is not None:
                text.finish()
        except Exception as error:
            self.fail_text(seq, error)
        if seq.seq_id not in self._judged:
            self._judged.add(seq.seq_id)
            self._judge(seq)

    def _judge(self, seq: Sequence) -> None:
        """End a sequence with an error if it is not what its request's structured outputs say."""
        grammar = seq.request.sampling.grammar
        if grammar is None or not seq.ended_by_token:
            return
        wrong = grammar.error(seq.token_ids[seq.prompt_len : -1])
        if wrong is not None:
            self.request.error = f"the structured output does not match what was asked for: {wrong}"
            seq.finish_reason = "error"

    def _new_prompt_logprobs(self) -> list[Mapping[int, Logprob] | None]:
        request = self.request
        reported = self._prompt_logprobs
        count = request.sampling.num_prompt_logprobs
        if count is not None:
            new = request.prompt_logprobs[len(reported) - 1 :]
            for token_id, computed in zip(request.prompt_token_ids[len(reported) :], new, strict=False):
                reported.append(self._token_texts.logprobs(token_id, computed, count))
        if request.params.output_kind is not RequestOutputKind.DELTA:
            return reported
        sent = self._num_sent_prompt_logprobs
        self._num_sent_prompt_logprobs = len(reported)
        return reported[sent:]
