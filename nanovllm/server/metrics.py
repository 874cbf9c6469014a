"""Prometheus metrics: vLLM's names where they mean the same, and the copies of offload under nanovllm's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nanovllm.llm import LLM
from nanovllm.outputs import RequestMetrics, RequestOutput

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
TOKENS = (1, 10, 100, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
TIMES = {  # name -> description, buckets
    "time_to_first_token_seconds": ("From arrival to the first token", SECONDS),
    "request_time_per_output_token_seconds": ("Time per token after the first", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step", SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last", SECONDS),
}


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, model_name))
        self._model_name = model_name
        labels = {"registry": self._registry, "labelnames": ["model_name"]}
        self._times = {
            name: Histogram(f"vllm:{name}", text, buckets=buckets, **labels).labels(model_name)  # type: ignore[arg-type]
            for name, (text, buckets) in TIMES.items()
        }
        self._tokens = {
            name: Histogram(f"vllm:{name}", text, buckets=TOKENS, **labels).labels(model_name)  # type: ignore[arg-type]
            for name, text in (
                ("request_prompt_tokens", "Prompt tokens of a request"),
                ("request_generation_tokens", "Generated tokens of a request"),
            )
        }
        self._finished = Counter(
            "vllm:request_success",
            "Requests by finish reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._counts = {
            name: Counter(f"vllm:{name}", text, ["model_name"], registry=self._registry).labels(model_name)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of finished requests"),
                ("prompt_tokens_cached", "Those of them that the prefix cache held"),
                ("generation_tokens", "Generated tokens of finished requests"),
            )
        }

    def observe(self, output: RequestOutput) -> None:
        """Count a request by its last output."""
        metrics, prompt = output.metrics, len(output.prompt_token_ids)
        for completion in output.outputs:
            self._finished.labels(self._model_name, str(completion.finish_reason)).inc()
        generated = metrics.decode_tokens + (len(output.outputs) if metrics.first_token_time is not None else 0)
        self._counts["prompt_tokens"].inc(prompt)
        self._counts["prompt_tokens_cached"].inc(output.num_cached_tokens)
        self._counts["generation_tokens"].inc(generated)
        self._tokens["request_prompt_tokens"].observe(prompt)
        self._tokens["request_generation_tokens"].observe(generated)
        for name, seconds in _times(metrics):
            if seconds is not None:
                self._times[name].observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _times(metrics: RequestMetrics) -> Iterator[tuple[str, float | None]]:
    arrived, scheduled = metrics.arrival_time, metrics.first_scheduled_time
    first, last = metrics.first_token_time, metrics.finished_time
    yield "time_to_first_token_seconds", metrics.ttft
    yield "request_time_per_output_token_seconds", metrics.tpot
    yield "request_queue_time_seconds", metrics.queue_time
    yield "e2e_request_latency_seconds", None if last is None else last - arrived
    yield "request_prefill_time_seconds", None if first is None or scheduled is None else first - scheduled
    yield "request_decode_time_seconds", None if first is None or last is None else last - first


class EngineCollector(Collector):
    """Reads the engine's numbers when they are asked for; between two scrapes it costs nothing."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm = llm
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        engine = self._llm.metrics()
        held = engine.used_blocks + engine.cached_blocks + engine.free_blocks
        gauges: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Requests in the engine's batches", engine.running_requests),
            "vllm:num_requests_waiting": ("Requests that wait for the engine", engine.waiting_requests),
            "vllm:num_requests_swapped": ("Requests that were swapped out", engine.swapped_requests),
            "vllm:kv_cache_usage_perc": (
                "Share of the KV blocks in use, from 0 to 1",
                engine.used_blocks / max(held, 1),
            ),
            "nanovllm:kv_blocks_used": ("KV blocks of running requests", engine.used_blocks),
            "nanovllm:kv_blocks_cached": ("KV blocks that only the prefix cache holds", engine.cached_blocks),
            "nanovllm:kv_blocks_free": ("Free KV blocks", engine.free_blocks),
            "nanovllm:kv_blocks_swapped": ("KV blocks in swap space", engine.swapped_blocks),
        }
        counters: dict[str, tuple[str, float]] = {
            "vllm:num_preemptions": ("Preemptions", engine.preemptions_by_recompute + engine.preemptions_by_swap),
            "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache", engine.prefix_cache_queried_tokens),
            "vllm:prefix_cache_hits": ("Tokens found in the prefix cache", engine.prefix_cache_hit_tokens),
        }
        for name, (text, value) in gauges.items():
            yield self._with(GaugeMetricFamily(name, text, labels=["model_name"]), [], value)
        for name, (text, value) in counters.items():
            yield self._with(CounterMetricFamily(name, text, labels=["model_name"]), [], value)
        yield from self._link()

    def _link(self) -> Iterator[Metric]:
        """Bytes between host and device, and what CPU attention kept off the link."""
        moved = self._llm.kv_stats().transfers
        copied = CounterMetricFamily(
            "nanovllm:kv_transfer_bytes", "KV bytes copied between host and device", labels=["model_name", "direction"]
        )
        self._with(copied, ["h2d"], moved.h2d_bytes)
        yield self._with(copied, ["d2h"], moved.d2h_bytes)
        busy = self._llm.link_busy()
        text = "Speed of the copies to the device while they run; bytes per second over this is the share of the link"
        speed = GaugeMetricFamily("nanovllm:kv_link_bytes_per_second", text, labels=["model_name"])
        yield self._with(speed, [], busy.num_bytes / busy.seconds if busy.seconds else 0.0)
        text = "KV bytes in host memory that the CPU attended to instead"
        attended = CounterMetricFamily("nanovllm:cpu_attention_bytes", text, labels=["model_name"])
        yield self._with(attended, [], moved.cpu_attention_bytes)

    def _with(
        self, family: CounterMetricFamily | GaugeMetricFamily, labels: list[str], value: float
    ) -> CounterMetricFamily | GaugeMetricFamily:
        family.add_metric([self._model_name, *labels], value)
        return family
