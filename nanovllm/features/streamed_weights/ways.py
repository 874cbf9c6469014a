"""Which way the layers whose weights stream take in a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nanovllm.data.network import ExpertSpec
from nanovllm.device import Busy, Device, Mark
from nanovllm.features.streamed_weights.host_products import HostExchange
from nanovllm.features.streamed_weights.host_share import HostShare, StepCost
from nanovllm.memory.weights import MOST_HOST_ROWS, WeightPlan

# All of a layer is copied, or the experts that its router chooses are brought, or all of its products run on the host.
Way = Literal["whole", "chosen", "host"]


class LayerWays:
    """The ways of layers in passes of so many rows. Where link and host divide layers, they follow measured times."""

    def __init__(
        self, plan: WeightPlan, specs: Mapping[int, ExpertSpec], share: HostShare | None, times: PassTimes | None
    ) -> None:
        """specs: of the layers that bring experts alone, by layer; share, times: where link and host divide layers."""
        self._plan = plan
        self._specs = specs
        self._share = share
        self._times = times
        self._latest: tuple[int, Mapping[int, Way]] | None = None

    @property
    def latest(self) -> Mapping[int, Way]:
        """Those of the pass that runs."""
        assert self._latest is not None
        return self._latest[1]

    def of(self, rows: int) -> Mapping[int, Way]:
        """By layer."""
        if self._latest is None or self._latest[0] != rows:
            shares = self._share is not None and self._plan.multiplies(rows)
            on_host = self._share.layers(rows) if self._share is not None and shares else ()
            ways = {index: self._way(index, rows, order in on_host) for order, index in enumerate(self._plan.streamed)}
            self._latest = rows, ways
        return self._latest[1]

    def _way(self, index: int, rows: int, on_host: bool) -> Way:
        spec = self._specs.get(index)
        if spec is not None:
            return "chosen" if self._plan.chooses(rows, spec) else "whole"
        return "host" if on_host or (self._plan.in_place and self._plan.multiplies(rows)) else "whole"

    def before_layer(self, index: int, rows: int) -> None:
        """A pass comes to a layer."""
        if self._times is not None:
            if self._times.is_behind(index):
                self.end_pass()
            self._times.note(index, rows)

    def end_pass(self) -> None:
        """The pass has ended, as is known at the latest when the next one begins."""
        cost = None if self._times is None else self._times.end()
        if cost is not None and self._share is not None:
            self._share.observe(cost)
            self._latest = None

    def forget_pass(self) -> None:
        """The pass has failed."""
        if self._times is not None:
            self._times.end()


@dataclass(slots=True)
class _Pass:
    """When the device came to a pass, and to the last layer that streams, and the counters before it."""

    since: Mark
    until: Mark | None  # None before that layer
    rows: int
    index: int  # of its latest layer
    link: Busy
    host_bytes: int
    host_seconds: float


class PassTimes:
    """What passes of few rows take, up to the last layer that streams: a long wait for a request may follow a pass."""

    def __init__(self, device: Device, exchange: HostExchange, last: int) -> None:
        """last: the last layer that streams."""
        self._device = device
        self._exchange = exchange
        self._last = last
        self._pass: _Pass | None = None

    def is_behind(self, index: int) -> bool:
        """Whether a layer is of the next pass."""
        return self._pass is not None and index < self._pass.index

    def note(self, index: int, rows: int) -> None:
        """The pass comes to a layer."""
        stream = self._device.compute_stream
        if self._pass is None:
            exchange = self._exchange
            link = self._device.link_busy()
            self._pass = _Pass(stream.mark(), None, rows, index, link, exchange.num_bytes, exchange.seconds)
        if index >= self._last and self._pass.until is None:
            self._pass.until = stream.mark()
        self._pass.index = index
        self._pass.rows = max(self._pass.rows, rows)

    def end(self) -> StepCost | None:
        """What the pass took; None if it had many rows, if that was told, or if the device is not done with it."""
        last = self._pass
        self._pass = None
        if last is None or last.rows > MOST_HOST_ROWS or last.until is None:
            return None
        since = last.since.seconds()
        until = last.until.seconds()
        if since is None or until is None:
            return None
        link = self._device.link_busy() - last.link
        host_bytes = self._exchange.num_bytes - last.host_bytes
        host_seconds = self._exchange.seconds - last.host_seconds
        return StepCost(last.rows, until - since, link.num_bytes, link.seconds, host_bytes, host_seconds)
