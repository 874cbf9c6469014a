"""The engine's metrics in the shapes and under the names of vLLM's metrics reader, where they mean the same.

Counters of tokens and requests, and histograms, count a request when it has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.request import Request

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
    """Counters in a row. vLLM has one, of speculative decoding, so this engine has none."""

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


class _Buckets:
    """Counts values by the smallest bound that is not below them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float | None) -> None:
        """Count a value; None is not known and not counted."""
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        total, buckets = 0, {}
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets[str(bound)] = total
        return Histogram(name, labels, total, self._sum, buckets)


def _lengths(request: Request) -> list[int]:
    return [seq.num_output_tokens for seq in request.sequences]


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


# The name without "vllm:", the bounds (None: of counts of tokens, up to max_model_len), and the value of a request.
HISTOGRAMS: tuple[tuple[str, tuple[float, ...] | None, Callable[[Request], float | None]], ...] = (
    ("request_prompt_tokens", None, lambda r: r.prompt_len),
    ("request_generation_tokens", None, lambda r: sum(_lengths(r))),
    ("request_max_num_generation_tokens", None, lambda r: max(_lengths(r), default=0)),
    ("request_prefill_kv_computed_tokens", None, lambda r: r.metrics.prefill_tokens),
    ("request_params_n", SEQUENCES, lambda r: r.params.n),
    ("request_params_max_tokens", None, lambda r: r.params.max_tokens),
    ("request_num_preemptions", PREEMPTIONS, lambda r: r.metrics.preemptions),
    ("time_to_first_token_seconds", FIRST_TOKEN_LATENCIES, lambda r: r.metrics.ttft),
    ("request_time_per_output_token_seconds", TOKEN_LATENCIES, lambda r: r.metrics.tpot),
    ("e2e_request_latency_seconds", LATENCIES, lambda r: _between(r.metrics.arrival_time, r.metrics.finished_time)),
    ("request_queue_time_seconds", LATENCIES, lambda r: r.metrics.queue_time),
    (
        "request_inference_time_seconds",
        LATENCIES,
        lambda r: _between(r.metrics.first_scheduled_time, r.metrics.finished_time),
    ),
    (
        "request_prefill_time_seconds",
        LATENCIES,
        lambda r: _between(r.metrics.first_scheduled_time, r.metrics.first_token_time),
    ),
    ("request_decode_time_seconds", LATENCIES, lambda r: _between(r.metrics.first_token_time, r.metrics.finished_time)),
)


class MetricsReader:
    """The engine's metrics in vLLM's shapes, with histograms of what requests took, counted when they end."""

    def __init__(self, max_model_len: int, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        tokens = tuple(_one_two_five(max_model_len))
        self._buckets = {f"vllm:{name}": _Buckets(bounds or tokens) for name, bounds, _ in HISTOGRAMS}
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0

    def observe(self, request: Request) -> None:
        """Count a request that has ended."""
        for name, _, value in HISTOGRAMS:
            self._buckets[f"vllm:{name}"].add(value(request))
        self._prompt_tokens += request.prompt_len
        self._cached_tokens += request.metrics.cached_tokens
        self._generated_tokens += sum(_lengths(request))
        for seq in request.sequences:
            reason = seq.finish_reason or "abort"
            self._finished[reason] = self._finished.get(reason, 0) + 1

    def read(self, engine: EngineMetrics) -> list[Metric]:
        """All metrics as they are now, labelled with the model's name."""
        labels = self._labels
        blocks = engine.used_blocks + engine.cached_blocks + engine.free_blocks
        waiting = engine.waiting_requests + engine.swapped_requests
        preemptions = engine.preemptions_by_recompute + engine.preemptions_by_swap
        return [
            Gauge("vllm:num_requests_running", labels, engine.running_requests),
            Gauge("vllm:num_requests_waiting", labels, waiting),
            Gauge("vllm:kv_cache_usage_perc", labels, engine.used_blocks / max(blocks, 1)),
            Counter("vllm:prefix_cache_queries", labels, engine.prefix_cache_queried_tokens),
            Counter("vllm:prefix_cache_hits", labels, engine.prefix_cache_hit_tokens),
            Counter("vllm:num_preemptions", labels, preemptions),
            Counter("vllm:prompt_tokens", labels, self._prompt_tokens),
            Counter("vllm:prompt_tokens_cached", labels, self._cached_tokens),
            Counter("vllm:generation_tokens", labels, self._generated_tokens),
            *(
                Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
                for reason, count in self._finished.items()
            ),
            *(buckets.histogram(name, labels) for name, buckets in self._buckets.items()),
        ]


def _one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    scale = 1
    while scale <= most:
        yield from (scale * digit for digit in (1, 2, 5) if scale * digit <= most)
        scale *= 10
