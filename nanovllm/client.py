"""The step loop of one caller: its requests, from being added until all of them have ended."""

from __future__ import annotations

from collections.abc import Iterable

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.errors import EngineError, RequestError, quoted, told
from nanovllm.features.beam_search import SearchedRequest
from nanovllm.outputs import RequestOutput


class EngineClient:
    """Adds requests to an engine, and steps it until they have ended: `while client.pending: client.step()`.

    Clients may step the engine within each other's loop: each output goes to the client that added the request. A
    request with use_beam_search has one output, in the end; meanwhile the client adds the requests of its rounds.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.pending: set[str] = set()  # ids of the requests that have not ended
        self._engine = engine
        self._inboxes = engine.inboxes
        self._inbox: list[RequestOutput] = []
        self._searches: dict[str, SearchedRequest] = {}  # by the ids of the requests with use_beam_search
        self._rounds: dict[str, SearchedRequest] = {}  # by the ids of the unfinished requests of their rounds

    def add(self, request: Request) -> None:
        """Add a request of `LLMEngine.make_request`; errors as in `LLMEngine.add`."""
        request_id = request.request_id
        if request_id in self._inboxes:
            raise RequestError(f"request id {quoted(request_id)} is in use: give every request an id of its own")
        self.pending.add(request_id)
        self._inboxes[request_id] = self._inbox
        try:
            if request.params.use_beam_search:
                search = SearchedRequest(request, self._engine.limits, self._engine.vocab_size)
                self._searches[request_id] = search
                self._begin_round(search)
            else:
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
            own = [output for output in failed if self._inboxes.get(output.request_id) is self._inbox]
            others = [output for output in failed if output not in own]
            self._post(others)
            error.outputs = [*self._read(own), *others]
            raise
        outputs = self._inbox.copy()
        self._inbox.clear()
        outputs = self._read(outputs)
        if self.pending and not outputs and not self._engine.has_unfinished_requests():
            raise EngineError(f"{len(self.pending)} requests of this call were ended by another")
        return outputs

    def abort(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """Abort the pending ones of these requests, or all pending ones. Returns their last outputs."""
        ended = self.pending.intersection(self.pending if request_ids is None else request_ids)
        outputs = [self._abort(request_id) for request_id in ended]
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """Abort all pending requests without outputs."""
        running = {*self.pending.difference(self._searches), *self._rounds}
        if running:
            self._engine.drop_requests(running)
        for request_id in {*self.pending, *running}:
            self._forget(request_id)

    def _post(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._inboxes:
                self._inboxes[output.request_id].append(output)

    def _forget(self, request_id: str) -> None:
        self.pending.discard(request_id)
        self._inboxes.pop(request_id, None)
        self._searches.pop(request_id, None)
        self._rounds.pop(request_id, None)

    def _read(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """The outputs for the caller. Requests that have ended are forgotten, and rounds that are done go on."""
        given = []
        for output in outputs:
            if output.request_id not in self._inboxes:  # it was aborted meanwhile, with its search
                continue
            search = self._rounds.get(output.request_id)
            if output.finished:
                self._forget(output.request_id)
            last = output if search is None else self._go_on(search, output)
            if last is not None:
                given.append(last)
        return given

    # ---- beam searches

    def _begin_round(self, search: SearchedRequest) -> None:
        for request in search.next_round():
            self._inboxes[request.request_id] = self._inbox
            self._rounds[request.request_id] = search
            try:
                self._engine.add(request)
            except Exception:
                self._forget(request.request_id)
                raise

    def _go_on(self, search: SearchedRequest, output: RequestOutput) -> RequestOutput | None:
        """Go on after an output of a round. Returns the output of the search if that has ended."""
        if output.error is not None:
            return self._cut(search, "error", output)
        if any(request.request_id in self._rounds for request in search.round):  # others of the round have not ended
            return None
        try:
            search.end_round()
            if not search.request.finished:
                self._begin_round(search)
                return None
        except Exception as error:  # ends this search only
            search.request.error = told(error)
            return self._cut(search, "error")
        return self._ended(search)

    def _abort(self, request_id: str) -> RequestOutput | None:
        search = self._searches.get(request_id)
        if search is not None:
            return self._cut(search, "abort")
        output = self._engine.abort_request(request_id)
        self._forget(request_id)
        return output

    def _cut(self, search: SearchedRequest, reason: str, failed: RequestOutput | None = None) -> RequestOutput:
        """End a search, with the beams that it has."""
        for request in search.round:
            self._engine.abort_request(request.request_id)
            self._forget(request.request_id)
        search.cut(reason, failed)
        return self._ended(search)

    def _ended(self, search: SearchedRequest) -> RequestOutput:
        self._forget(search.request.request_id)
        return self._engine.last_output(search.request)
