"""The step loop of one caller: its requests, from being added until all of them have ended."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.errors import EngineError, RequestError, quoted
from nanovllm.outputs import RequestOutput


class EngineClient:
    """Adds requests to an engine, and steps it until they have ended: `while client.pending: client.step()`.

    Clients may step the engine within each other's loop: each output goes to the client that added the request.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._inboxes = engine.inboxes
        self._inbox: list[RequestOutput] = []
        self.pending: set[str] = set()  # ids of the requests that have not ended

    def add(self, request: Request) -> None:
        """Add a request of `LLMEngine.make_request`; errors as in `LLMEngine.add`."""
        request_id = request.request_id
        if request_id in self._inboxes:
            raise RequestError(f"request id {quoted(request_id)} is in use: give every request an id of its own")
        self.pending.add(request_id)
        self._inboxes[request_id] = self._inbox
        try:
            self._engine.add(request)
        except Exception:
            self._forget(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """The next outputs of this client's requests; runs a step of the engine unless another client's step made some.

        Raises EngineError for a failed step, and if the pending requests were aborted by another caller.
        """
        try:
            if not self._inbox:
                self._post(self._engine.step())
        except EngineError as error:
            failed = [output for output in error.outputs if isinstance(output, RequestOutput)]
            self._post(output for output in failed if output.request_id not in self.pending)
            for output in failed:
                if output.request_id in self.pending:
                    self._forget(output.request_id)
            raise
        outputs = self._inbox.copy()
        self._inbox.clear()
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)
        if self.pending and not outputs and not self._engine.has_unfinished_requests():
            raise EngineError(f"{len(self.pending)} requests of this call were ended by another")
        return outputs

    def abort(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """Abort the pending ones of these requests, or all pending ones. Returns their last outputs."""
        ended = self.pending.intersection(self.pending if request_ids is None else request_ids)
        outputs = [self._engine.abort_request(request_id) for request_id in ended]
        for request_id in ended:
            self._forget(request_id)
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """Abort all pending requests without outputs."""
        pending = set(self.pending)
        if pending:
            self._engine.drop_requests(pending)
        for request_id in pending:
            self._forget(request_id)

    def _post(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)

    def _forget(self, request_id: str) -> None:
        self.pending.discard(request_id)
        self._inboxes.pop(request_id, None)
