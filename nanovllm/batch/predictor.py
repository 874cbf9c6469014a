"""LLMPredictor: an engine for the batches of Ray Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xxhash

from nanovllm.batch.replica import Replica, ReplicaSettings
from nanovllm.batch.rows import RESULT_COLUMNS, Row, RowFormat, RowResult, failed_result
from nanovllm.errors import EngineError, RequestError, quoted

ADDED = tuple(name for name in RESULT_COLUMNS if name != "row_index")


class LLMPredictor:
    """A class for `Dataset.map_batches`: one engine for each actor, whose rows run together.

        ds.map_batches(
            LLMPredictor,
            fn_constructor_kwargs={"model": DIR, "sampling_params": {"max_tokens": 100}},
            concurrency=2, num_gpus=1, batch_size=64,
        )

    A row has one of the columns prompt, prompt_token_ids, messages and body, as in `nanovllm batch`. It keeps its
    columns and gains generated_text, finish_reason, outputs, prompt_logprobs, usage and error. A row that cannot be
    served has an error and does not affect the others; a failure of the engine is raised, so that Ray runs the batch
    again.

    A row without a seed gets one that its prompt and `id` determine, so the answer is the same wherever it runs.
    Rows with the same prompt and `id` have the same answer: give them seeds, or ids.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        chat_template: str | None = None,
        **engine_arguments: Any,
    ) -> None:
        """sampling_params: of rows that do not give their own. chat_template: the text of one. Others: as of LLM."""
        sampling = dict(sampling_params or {})
        self._replica = Replica(ReplicaSettings(model, engine_arguments, sampling, chat_template))
        config = self._replica.llm.config
        names = config.served_model_name or ()
        self._format = RowFormat(
            prompt_column=prompt_column,
            model_names=(str(model), *((names,) if isinstance(names, str) else names)),
            has_max_tokens="max_tokens" in sampling,
        )
        self._seed = config.seed

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the rows of a batch: columns as arrays, as batch_format="numpy" has them."""
        import numpy

        if not isinstance(batch, Mapping):
            raise EngineError(f'LLMPredictor takes batches of batch_format="numpy", got {quoted(type(batch).__name__)}')
        taken = [name for name in ADDED if name in batch]
        if taken:
            raise EngineError(f"the dataset has a column {taken[0]!r}, which is a result: rename or drop it first")
        num_rows = len(next(iter(batch.values()), ()))
        results = self._results(
            [
                {name: _plain(batch[name][i]) for name in {*self._format.used_columns, "id"} & batch.keys()}
                for i in range(num_rows)
            ]
        )
        added = {name: numpy.empty(num_rows, dtype=object) for name in ADDED}
        for result in results:
            for name, values in added.items():
                values[result.index] = result.columns[name]
        return {**batch, **added}

    def _results(self, rows: list[dict[str, Any]]) -> list[RowResult]:
        results, requests = [], []
        for index, columns in enumerate(rows):
            try:
                request = self._format.request(Row(index, f"row {index}", columns, None))
            except RequestError as error:
                results.append(failed_result(index, str(error)))
                continue
            if request.params.get("seed") is None and "seed" not in self._replica.given_sampling:
                content = repr((columns.get("id"), [*request.prefix_parts()], self._seed)).encode()
                request = replace(request, params={**request.params, "seed": xxhash.xxh3_64(content).intdigest() >> 1})
            requests.append(request)
        results += self._replica.add(requests)
        while self._replica.has_work:
            results += self._replica.step()
        return results


def _plain(value: Any) -> Any:
    """A value of numpy as Python's own."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items() if part is not None}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
