"""LLMPredictor: an engine for the batches of Ray Data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import xxhash

from nanovllm.apps.batch.inputs import check_pyarrow, python_row
from nanovllm.apps.batch.replica import Replica, ReplicaSettings
from nanovllm.apps.batch.results import with_results
from nanovllm.apps.batch.rows import Row, RowFormat, RowRequest

if TYPE_CHECKING:
    import pyarrow


class LLMPredictor:
    """A class for `Dataset.map_batches`: one engine for each actor, in which the rows of a batch run together.

        ds.map_batches(
            LLMPredictor,
            fn_constructor_kwargs={"model": DIR, "sampling_params": {"max_tokens": 100}},
            batch_format="pyarrow", batch_size=64, num_gpus=1, compute=ray.data.ActorPoolStrategy(size=2),
        )

    A row has one of the columns prompt, prompt_token_ids, messages and body, as in `nanovllm batch`. It keeps its
    columns and gains those of `nanovllm batch` but row_index. A row that cannot be served has an error and does not
    affect the others; a failure of the engine is raised, so that Ray runs the batch again.

    A row without a seed gets one that its prompt and its `id` determine, so that its answer is the same wherever it
    runs. So rows with the same prompt and the same id have the same answer.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        tool_call_parser: str = "auto",
        **engine_arguments: Any,
    ) -> None:
        """sampling_params: of rows that do not give their own. chat_template: the text of one. tool_call_parser: as
        the server's. Others: as of LLM.chat and LLM."""
        check_pyarrow()
        sampling = dict(sampling_params or {})
        chat = chat_template, chat_template_content_format, tool_call_parser
        self._replica = Replica(ReplicaSettings(model, engine_arguments, sampling, *chat))
        config = self._replica.llm.config
        names = config.served_model_name or ()
        self._format = RowFormat(
            prompt_column=prompt_column,
            model_names=(str(model), *((names,) if isinstance(names, str) else names)),
            has_max_tokens="max_tokens" in sampling,
        )
        self._engine_seed = config.seed

    def __call__(self, batch: pyarrow.Table | Mapping[str, Any]) -> pyarrow.Table:
        """Answer the rows of a batch: a table, or columns by name, as batch_format="numpy" has them."""
        table = _table(batch)
        used = table.select([name for name in table.column_names if name in {*self._format.used_columns, "id"}])
        rows = [Row(i, f"row {i}", python_row(used, i), None) for i in range(table.num_rows)]
        ended = [pair for pairs in self._replica.answers(rows, self._format, self._seed) for pair in pairs]
        results = sorted((result for _, result in ended), key=lambda result: result.index)
        return with_results(table, results).drop_columns(["row_index"])

    def _seed(self, row: Row, request: RowRequest) -> int:
        """The seed of a row that has none, wherever it runs."""
        prompt = (request.prompt, request.prompt_token_ids, request.messages, request.template_options)
        content = repr((row.columns.get("id"), prompt, request.cache_salt, self._engine_seed))
        return xxhash.xxh3_64(content.encode(errors="replace")).intdigest() >> 1


def _table(batch: pyarrow.Table | Mapping[str, Any]) -> pyarrow.Table:
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return batch
    return pa.table({name: pa.array(list(column), from_pandas=True) for name, column in batch.items()})
