"""`nanovllm batch`: answers the rows of files into a directory, in this process or by replicas on a cluster of Ray."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.apps.batch.inputs import Inputs, Slice, open_inputs
from nanovllm.apps.batch.replica import Replica, ReplicaSettings
from nanovllm.apps.batch.results import ResultDirectory
from nanovllm.apps.batch.rows import Row, RowFormat, RowResult, failed_result
from nanovllm.apps.cli.arguments import (
    add_chat_flags,
    add_command,
    add_engine_flags,
    add_progress_flag,
    add_sampling_flags,
    checked_config,
    engine_arguments,
    positive,
    read_text,
    sampling_arguments,
)
from nanovllm.apps.cli.boundary import say
from nanovllm.apps.cli.engine import kv_line, loading, progress_bar
from nanovllm.apps.cli.main import INTERRUPTED
from nanovllm.apps.tool_calls.formats import PARSER_HELP, PARSERS
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.progress_bar import Meter, ProgressBar, of
from nanovllm.sampling_params import SamplingParams
from nanovllm.vllm_names import ENGINE_ALIASES

if TYPE_CHECKING:
    from nanovllm import LLM, KVStats

SLICE = 4  # most rows that an actor has at a time, as a multiple of max_num_seqs
SLICES_EACH = 8  # least slices of each actor, so that all have something to do to the end
# Engine arguments that change no result, so a job may be resumed with others.
WITHOUT_EFFECT = (
    *("max_num_seqs", "max_num_batched_tokens", "kvcache_block_size", "gpu_memory_utilization", "num_gpu_blocks"),
    *("num_cpu_blocks", "enable_cpu_offload", "cpu_attention", "enable_prefix_caching", "preemption_mode"),
    *("kv_cache_memory_bytes", "kv_offloading_size", "distributed_executor_backend", "distributed_timeout_seconds"),
    *("long_prefill_token_threshold", "swap_space", "enforce_eager", "trace", "download_dir", "hf_token"),
    *("kv_cache_dir", "kv_cache_dir_space", "host_weights_bytes", "weights_dir"),
)
# Engine arguments that may be directories.
PATHS = ("tokenizer", "generation_config", "download_dir", "kv_cache_dir", "weights_dir")


def add_parser(subparsers: Any, summary: str) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = add_command(
        subparsers,
        "batch",
        summary,
        "Answers the rows of files: each has a prompt, prompt_token_ids, messages or, as in OpenAI's batch files, a "
        "body; and, if wanted, sampling parameters. Every row is written once, with its columns and the answer or an "
        "error, to part files of the same format.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="JSON-lines or Parquet files, or directories of them")
    add("--output", required=True, metavar="DIR", help="directory of the results")
    add("--resume", action="store_true", help="compute the rows that an earlier run has not written to DIR")
    add("--prompt-column", default="prompt", metavar="NAME", help="column that is the prompt (default: prompt)")
    add_chat_flags(parser, prompts=True)
    add("--tool-call-parser", choices=PARSERS, default="auto", metavar="NAME", help=PARSER_HELP)
    add_progress_flag(parser)
    _add_cluster_flags(parser.add_argument_group("replicas"))
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def _add_cluster_flags(group: Any) -> None:
    add = group.add_argument
    add("--num-replicas", type=positive, default=1, metavar="N", help="engines; more than one needs Ray (default: 1)")
    add("--ray-address", metavar="ADDRESS", help="cluster, such as auto or 10.0.0.1:6379; local: start one here")
    add("--num-cpus", type=float, metavar="X", help="CPUs of a replica (default: an even share; with GPUs 1)")
    add("--num-gpus", type=float, metavar="X", help="GPUs of a replica (default: 1 if the cluster has any)")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if a row failed."""
    inputs = open_inputs(args.input)
    template = read_text("--chat-template", args.chat_template)
    sampling = sampling_arguments(args)
    SamplingParams(**sampling)  # refuses wrong values before a model is loaded
    config = checked_config(args)
    _check_cluster_flags(args, config)
    settings = ReplicaSettings(
        _absolute(args.model),
        _engine_arguments(args),
        sampling,
        template,
        args.chat_template_content_format,
        args.tool_call_parser,
    )
    row_format = RowFormat(
        prompt_column=args.prompt_column,
        is_chat=args.chat,
        system=args.system,
        model_names=_model_names(args.model, config),
        has_max_tokens="max_tokens" in sampling,
    )
    output = ResultDirectory(args.output, inputs.format, inputs.schema())
    output.open(_job(inputs, settings, row_format), args.resume)
    with output:
        return BatchRun(args, config, settings, row_format, inputs, output).run()


def _check_cluster_flags(args: argparse.Namespace, config: EngineConfig) -> None:
    if not _is_on_cluster(args):
        if (args.num_cpus, args.num_gpus) != (None, None):
            raise ConfigError("--num-cpus and --num-gpus are for replicas on a cluster: add --ray-address")
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("replicas and --ray-address need Ray: pip install 'nanovllm[ray]'")
    if config.trace is not None:
        raise ConfigError("--trace is the file of one engine, and replicas would overwrite it: leave it out")


def _is_on_cluster(args: argparse.Namespace) -> bool:
    return args.num_replicas > 1 or args.ray_address is not None


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Under the engine's own names, and with absolute paths, since workers run in other directories."""
    given = {ENGINE_ALIASES.get(name, name): value for name, value in engine_arguments(args).items()}
    given |= {name: _absolute(given[name]) for name in PATHS if isinstance(given.get(name), str)}
    if "model" in (drafts := given.get("speculative_config") or {}):
        given["speculative_config"] = {**drafts, "model": _absolute(drafts["model"])}
    return given


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def _model_names(given: str, config: EngineConfig) -> tuple[str, ...]:
    """What the rows may call the model: its path as given, its directory's name, and --served-model-name."""
    served = config.served_model_name or ()
    names = (served,) if isinstance(served, str) else tuple(served)
    return tuple(dict.fromkeys((*names, given, Path(given).resolve().name)))


def _job(inputs: Inputs, settings: ReplicaSettings, row_format: RowFormat) -> dict[str, Any]:
    """What the results depend on: a job is resumed only with the same."""
    engine = {name: value for name, value in settings.engine_arguments.items() if name not in WITHOUT_EFFECT}
    return {
        "--input": inputs.fingerprint(),
        "--model": settings.model,
        "engine arguments": json.loads(json.dumps(engine, default=str)),
        "sampling parameters": json.loads(json.dumps(settings.sampling, default=str)),
        "--chat-template": settings.chat_template,
        "--chat-template-content-format": settings.chat_template_content_format,
        "--tool-call-parser": settings.tool_call_parser,
        "options for rows": asdict(row_format),
    }


@dataclass
class BatchRun:
    """Runs the rows that are not done, and shows progress, sentences and the totals."""

    args: argparse.Namespace
    config: EngineConfig
    settings: ReplicaSettings
    row_format: RowFormat
    inputs: Inputs
    output: ResultDirectory
    meter: Meter = field(default_factory=Meter)
    first_error: str = ""
    kv_stats: KVStats | None = None  # of an engine in this process
    num_cut: int = 0  # answered rows that were cut at max_tokens or max_model_len

    def run(self) -> int:
        """Returns the exit status."""
        done = self.output.done
        slices = list(self._slices())
        total = sum(part.count for part in slices)
        if self.args.resume:
            self.say(f"{of(len(done), total)} rows are done")
        try:
            if len(done) < total:
                self._run_rows(slices, total)
        except (KeyboardInterrupt, EngineError) as error:
            self.output.flush()
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else "the job has ended early"
            self.say(f"{what}: {of(len(done), total)} rows are written; --resume computes the others")
            if isinstance(error, EngineError):
                raise
            return INTERRUPTED
        self.output.finish()
        return self._ended()

    def _slices(self, most_rows: int = sys.maxsize) -> Iterator[Slice]:
        """The input in slices of at most so many rows, with what is done of each."""
        for part in self.inputs.slices(most_rows):
            yield replace(
                part, done=frozenset(self.output.done.intersection(range(part.index, part.index + part.count)))
            )

    def _rows(self, slices: Iterable[Slice]) -> Iterator[Row]:
        return (row for part in slices for row in self.inputs.rows(part, self.row_format.used_columns))

    def _run_rows(self, slices: Iterable[Slice], total: int) -> None:
        if _is_on_cluster(self.args):
            self._run_on_cluster(total)
            return
        with loading(self.args.model, progress_bar(self.args)):
            replica = Replica(self.settings)
        self.meter = Meter()
        num_rows = total - len(self.output.done)
        try:
            self._write(replica.answers(self._rows(slices), self.row_format), replica.llm, num_rows)
        finally:
            self.kv_stats = replica.llm.kv_stats()
            replica.close()

    def _run_on_cluster(self, total: int) -> None:
        """Run slices. Rows of slices that were lost then run alone, and those that are lost again have failed."""
        from nanovllm.apps.batch import ray_data

        args = self.args
        done = self.output.done
        before = len(done)
        even_share = total // (SLICES_EACH * args.num_replicas)
        most_rows = max(1, min(even_share, SLICE * self.config.max_num_seqs))
        with ray_data.cluster(args.ray_address, args.verbose):
            gpus = 0 if self.config.device == "cpu" else self.config.tensor_parallel_size
            resources = ray_data.resources_each(args.num_replicas, args.num_cpus, args.num_gpus, gpus)
            pool = ray_data.Pool(self.settings, self.row_format, self.inputs, args.num_replicas, resources)
            self._write(pool.answers(self._slices(most_rows)), None, total - before)
            if len(done) == before:
                raise EngineError("no replica on the cluster has answered a row: --verbose shows what they print")
            self._write(pool.answers(self._slices(1)), None, total - before)
        for row in self._rows(self._slices()):
            error = f"{row.source}: every worker that ran this row was lost, also when it ran alone"
            self._count(self.output.add(row, failed_result(row.index, error)))

    def _write(self, answers: Iterator[list[tuple[Row, RowResult]]], llm: LLM | None, num_rows: int) -> None:
        """Write results as they come, and show how far the job is."""
        with ProgressBar(progress_bar(self.args), num_rows, self.meter, llm) as bar:
            for ended in answers:
                for row, result in ended:
                    self._count(self.output.add(row, result))
                    self.output.flush_if_due()
                self.output.flush_if_due()
                bar.refresh()

    def say(self, sentence: str) -> None:
        """A sentence, on a line of its own."""
        say(f"nanovllm batch: {sentence}")

    def _count(self, result: RowResult) -> None:
        """Count a row that has its result."""
        self.meter.generated += result.generated_tokens
        if result.metrics is not None:
            self.meter.count_request(result.metrics)
        if result.error is not None:
            self.meter.failed += 1
            self.first_error = self.first_error or result.error
            return
        self.meter.finished += 1
        outputs = result.columns["outputs"] or ()
        self.num_cut += any(output["finish_reason"] == "length" for output in outputs)

    def _ended(self) -> int:
        """Show the totals. Returns the exit status."""
        meter = self.meter
        if meter.finished + meter.failed and not self.args.quiet:
            say(meter.summary())
            if self.kv_stats is not None:
                say(kv_line(self.kv_stats, meter.num_tokens))
            say(
                f"{meter.finished + meter.failed:,} rows: {meter.finished:,} answered, of which {self.num_cut:,} cut "
                f"at --max-tokens or max_model_len; {meter.failed:,} failed"
            )
        failed = self.output.num_failed
        if not failed:
            return 0
        first = f"; the first: {self.first_error}" if self.first_error else ""
        self.say(f"error: {failed:,} of {len(self.output.done):,} rows failed{first}")
        return 1
