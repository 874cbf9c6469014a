"""`/metrics` for Prometheus: the engine's metrics under vLLM's names, and blocks and copies under nanovllm's own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nanovllm import LLM, Counter, Gauge, Histogram

AS_IN_VLLM = "What vLLM's metric of this name counts"


class ServerMetrics(Collector):
    """The metrics of one server. They are read when they are asked for; between two scrapes they cost nothing."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm = llm
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._vllms()
        yield from self._own()

    def _vllms(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._llm.get_metrics():
            labels = {**metric.labels, "model_name": self._model_name}
            names = list(labels)
            values = list(labels.values())
            if isinstance(metric, Histogram):
                family = families.setdefault(metric.name, HistogramMetricFamily(metric.name, AS_IN_VLLM, labels=names))
                assert isinstance(family, HistogramMetricFamily)
                family.add_metric(values, list(metric.buckets.items()), metric.sum)
                continue
            assert isinstance(metric, Counter | Gauge)
            kind = CounterMetricFamily if isinstance(metric, Counter) else GaugeMetricFamily
            family = families.setdefault(metric.name, kind(metric.name, AS_IN_VLLM, labels=names))
            family.add_metric(values, metric.value)  # type: ignore[attr-defined]
        return families.values()

    def _own(self) -> Iterable[Metric]:
        """Blocks, bytes between host and device, and what CPU attention kept off the link."""
        engine = self._llm.metrics()
        stats = self._llm.kv_stats()
        moved = stats.transfers
        busy = self._llm.link_busy()
        swapped = "Requests that were swapped out, which vllm:num_requests_waiting counts too"
        loading = "Requests whose KV is being read from kv_cache_dir, which vllm:num_requests_waiting counts too"
        speed = "Speed of the copies to the device while they run; bytes per second over this is the share of the link"
        for name, text, value in (
            ("kv_blocks_used", "KV blocks of running requests", engine.blocks.used),
            ("kv_blocks_cached", "KV blocks that only the prefix cache holds", engine.blocks.cached),
            ("kv_blocks_free", "Free KV blocks", engine.blocks.free),
            ("kv_blocks_swapped", "KV blocks in swap space", engine.blocks.swapped),
            ("requests_swapped", swapped, engine.requests.swapped),
            ("requests_loading", loading, engine.requests.loading),
            ("kv_link_bytes_per_second", speed, busy.num_bytes / busy.seconds if busy.seconds else 0.0),
        ):
            gauge = GaugeMetricFamily(f"nanovllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        text = "KV bytes copied between host and device"
        copied = CounterMetricFamily("nanovllm:kv_transfer_bytes", text, labels=["model_name", "direction"])
        copied.add_metric([self._model_name, "h2d"], moved.h2d_bytes)
        copied.add_metric([self._model_name, "d2h"], moved.d2h_bytes)
        text = "Prompt tokens found in the prefix cache, by where their KV was"
        cached = CounterMetricFamily("nanovllm:cached_tokens", text, labels=["model_name", "tier"])
        host = engine.prefix_cache.hit_tokens_on_host
        disk = engine.prefix_cache.hit_tokens_on_disk
        device = engine.prefix_cache.hit_tokens - host - disk
        for tier, tokens in (("device", device), ("host", host), ("disk", disk)):
            cached.add_metric([self._model_name, tier], tokens)
        text = "Prompt tokens that were computed again, since the KV of an earlier prompt was no longer there"
        recomputed = CounterMetricFamily("nanovllm:recomputed_tokens", text, labels=["model_name"])
        recomputed.add_metric([self._model_name], engine.prefix_cache.recomputed_tokens)
        text = "KV bytes in host memory that the CPU attended to instead"
        attended = CounterMetricFamily("nanovllm:cpu_attention_bytes", text, labels=["model_name"])
        attended.add_metric([self._model_name], moved.cpu_attention_bytes)
        text = "Weight bytes copied to the device, of layers that stream from host memory"
        weights = CounterMetricFamily("nanovllm:loaded_weight_bytes", text, labels=["model_name"])
        weights.add_metric([self._model_name], stats.loaded_weight_bytes)
        text = "Weight bytes read from disk, of layers that stream"
        read = CounterMetricFamily("nanovllm:read_weight_bytes", text, labels=["model_name"])
        read.add_metric([self._model_name], stats.read_weight_bytes)
        yield from (copied, cached, recomputed, attended, weights, read)
