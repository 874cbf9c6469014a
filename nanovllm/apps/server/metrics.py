"""`/metrics` for Prometheus: the engine's metrics under vLLM's names, and blocks and copies under nanovllm's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
        yield from self._blocks()
        yield from self._link()

    def _vllms(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._llm.get_metrics():
            labels = {**metric.labels, "model_name": self._model_name}
            names, values = list(labels), list(labels.values())
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

    def _blocks(self) -> Iterator[Metric]:
        engine = self._llm.metrics()
        for name, text, value in (
            ("kv_blocks_used", "KV blocks of running requests", engine.used_blocks),
            ("kv_blocks_cached", "KV blocks that only the prefix cache holds", engine.cached_blocks),
            ("kv_blocks_free", "Free KV blocks", engine.free_blocks),
            ("kv_blocks_swapped", "KV blocks in swap space", engine.swapped_blocks),
            (
                "requests_swapped",
                "Requests that were swapped out, which vllm:num_requests_waiting counts too",
                engine.swapped_requests,
            ),
        ):
            yield self._family(GaugeMetricFamily, name, text, {(): value})

    def _link(self) -> Iterator[Metric]:
        """Bytes between host and device, and what CPU attention kept off the link."""
        moved, busy = self._llm.kv_stats().transfers, self._llm.link_busy()
        text = "KV bytes copied between host and device"
        copied = {("h2d",): moved.h2d_bytes, ("d2h",): moved.d2h_bytes}
        yield self._family(CounterMetricFamily, "kv_transfer_bytes", text, copied, ["direction"])
        text = "Speed of the copies to the device while they run; bytes per second over this is the share of the link"
        speed = busy.num_bytes / busy.seconds if busy.seconds else 0.0
        yield self._family(GaugeMetricFamily, "kv_link_bytes_per_second", text, {(): speed})
        text = "KV bytes in host memory that the CPU attended to instead"
        yield self._family(CounterMetricFamily, "cpu_attention_bytes", text, {(): moved.cpu_attention_bytes})

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[Any, float],
        labels: list[str] | None = None,
    ) -> Metric:
        """The metric nanovllm:`name`. values: by the tuple of the values of `labels`."""
        family = kind(f"nanovllm:{name}", text, labels=["model_name", *(labels or ())])
        for label_values, value in values.items():
            family.add_metric([self._model_name, *label_values], value)
        return family
