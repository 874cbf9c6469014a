"""The engine's metrics in the shapes and under the names of vLLM's metrics reader, where they mean the same.

Counters of tokens and requests, and histograms, count a request when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestMetrics

FINISH_REASONS = ("stop", "length", "abort", "error")
# Upper bounds of the buckets in seconds, as vLLM has them.
LATENCIES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_LATENCIES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCIES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
SEQUENCES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


@dataclass
class Metric:
    """One metric. labels: what tells it from others of the same name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters in a row. vLLM has one, of accepted drafts by position, which this engine does not count."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number at this moment."""

    value: float


@dataclass
class Histogram(Metric):
    """How often values were at most as large as each bound.

    buckets: by bound, as text, up to "+Inf", which counts all values.
    """

    count: int
    sum: float
    buckets: dict[str, int]


# The name without "vllm:", the bounds (None: of counts of tokens, up to max_model_len), and the value of a request
# with these metrics and output lengths.
HISTOGRAMS: tuple[tuple[str, tuple[float, ...] | None, Callable[[Request, RequestMetrics, list[int]], Any]], ...] = (
    ("request_prompt_tokens", None, lambda r, m, lengths: r.prompt_len),
    ("request_generation_tokens", None, lambda r, m, lengths: sum(lengths)),
    ("request_max_num_generation_tokens", None, lambda r, m, lengths: max(lengths, default=0)),
    ("request_prefill_kv_computed_tokens", None, lambda r, m, lengths: m.prefill_tokens),
    ("request_params_n", SEQUENCES, lambda r, m, lengths: r.params.n),
    ("request_params_max_tokens", None, lambda r, m, lengths: r.params.max_tokens),
    ("request_num_preemptions", PREEMPTIONS, lambda r, m, lengths: m.preemptions),
    ("time_to_first_token_seconds", FIRST_TOKEN_LATENCIES, lambda r, m, lengths: m.ttft),
    ("request_time_per_output_token_seconds", TOKEN_LATENCIES, lambda r, m, lengths: m.tpot),
    ("e2e_request_latency_seconds", LATENCIES, lambda r, m, lengths: m.e2e_latency),
    ("request_queue_time_seconds", LATENCIES, lambda r, m, lengths: m.queue_time),
    ("request_inference_time_seconds", LATENCIES, lambda r, m, lengths: m.inference_time),
    ("request_prefill_time_seconds", LATENCIES, lambda r, m, lengths: m.prefill_time),
    ("request_decode_time_seconds", LATENCIES, lambda r, m, lengths: m.decode_time),
)


class MetricsReader:
    """The engine's metrics in vLLM's shapes, with histograms of what requests took, counted when they end."""

    def __init__(self, max_model_len: int, model_name: str) -> None:
        labels = self._labels = {"model_name": model_name, "engine": "0"}
        steps = (digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
        tokens = tuple(bound for bound in steps if bound <= max_model_len)
        self._histograms = []
        for name, bounds, _ in HISTOGRAMS:
            buckets = {str(bound): 0 for bound in (*map(float, bounds or tokens), "+Inf")}
            self._histograms.append(Histogram(f"vllm:{name}", labels, 0, 0.0, buckets))
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    def observe(self, request: Request) -> None:
        """Count a request that has ended."""
        lengths = [seq.num_output_tokens for seq in request.sequences]
        for histogram, (_, _, value_of) in zip(self._histograms, HISTOGRAMS, strict=True):
            value = value_of(request, request.metrics, lengths)
            if value is not None:  # else it is not known
                histogram.count += 1
                histogram.sum += value
                for bound in histogram.buckets:
                    histogram.buckets[bound] += value <= float(bound)
        self._prompt_tokens += request.prompt_len
        self._cached_tokens += request.metrics.cached_tokens
        self._generated_tokens += sum(lengths)
        for seq in request.sequences:
            self._finished[seq.finish_reason or "abort"] += 1

    def read(self, engine: EngineMetrics) -> list[Metric]:
        """All metrics as they are now, labelled with the model's name."""
        labels = self._labels
        blocks = engine.blocks.used + engine.blocks.cached + engine.blocks.free
        waiting = engine.requests.waiting + engine.requests.loading + engine.requests.swapped
        preemptions = engine.preemptions.recomputed + engine.preemptions.swapped
        return [
            Gauge("vllm:num_requests_running", labels, engine.requests.running),
            Gauge("vllm:num_requests_waiting", labels, waiting),
            Gauge("vllm:kv_cache_usage_perc", labels, engine.blocks.used / max(blocks, 1)),
            Counter("vllm:prefix_cache_queries", labels, engine.prefix_cache.queried_tokens),
            Counter("vllm:prefix_cache_hits", labels, engine.prefix_cache.hit_tokens),
            Counter("vllm:num_preemptions", labels, preemptions),
            Counter("vllm:spec_decode_num_drafts", labels, engine.drafts.drafts),
            Counter("vllm:spec_decode_num_draft_tokens", labels, engine.drafts.drafted_tokens),
            Counter("vllm:spec_decode_num_accepted_tokens", labels, engine.drafts.accepted_tokens),
            Counter("vllm:prompt_tokens", labels, self._prompt_tokens),
            Counter("vllm:prompt_tokens_cached", labels, self._cached_tokens),
            Counter("vllm:generation_tokens", labels, self._generated_tokens),
            *(
                Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
                for reason, count in self._finished.items()
            ),
            *(replace(histogram, buckets=dict(histogram.buckets)) for histogram in self._histograms),
        ]
