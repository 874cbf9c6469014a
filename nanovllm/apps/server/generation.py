"""The engine's requests that one HTTP request makes: started together, ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nanovllm import AsyncLLM
from nanovllm.apps.server.async_llm import RequestStream
from nanovllm.apps.server.http_errors import LONGEST, SERVER, ApiError, invalid
from nanovllm.errors import one_line, quoted
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import PromptParts

if TYPE_CHECKING:  # for annotations only: torch comes with it
    from nanovllm import LoRARequest


logger = logging.getLogger(__name__)


class Generation:
    """Outputs of one or several prompts. `close` aborts those that have not ended, and releases what `held` holds."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        self._streams: list[RequestStream] = []

    async def start(
        self,
        engine: AsyncLLM,
        prompts: Sequence[PromptParts],
        params: SamplingParams,
        request_id: str,
        priority: int,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Add the requests to the engine. Raises RequestError, and adds none, if one of them cannot be served."""
        others: dict[str, Any] = {"lora_request": lora_request, "priority": priority}
        adding = [
            asyncio.ensure_future(engine.add(_prompt(part), params, f"{request_id}-{i}", **others))
            for i, part in enumerate(prompts)
        ]
        try:
            self._streams = list(await asyncio.gather(*adding))
        except BaseException:
            for task in adding:
                task.cancel()
                task.add_done_callback(_drop)
            self.close()
            raise

    async def final(self) -> list[RequestOutput]:
        """The last output of each prompt, in order."""
        return [await self._last(stream) for stream in self._streams]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs as they come, with the number of the prompt."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, self._checked(output)
            return
        # One output waits at most: while the client is slow, outputs merge in their collectors.
        waiting: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(1)
        pumps = [asyncio.ensure_future(_pump(i, stream, waiting)) for i, stream in enumerate(self._streams)]
        try:
            unfinished = len(pumps)
            while unfinished:
                number, got = await waiting.get()
                if isinstance(got, Exception):
                    raise got
                yield number, self._checked(got)
                unfinished -= got.finished
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    def close(self) -> None:
        """Safe to call twice."""
        for stream in self._streams:
            stream.close()
        self._held.close()

    async def _last(self, stream: RequestStream) -> RequestOutput:
        async for output in stream:
            if output.finished:
                return self._checked(output)
        raise AssertionError("the last output of a request is its end")

    def _checked(self, output: RequestOutput) -> RequestOutput:
        """The output. Raises ApiError for a request that has failed.

        A failed step is the engine's own, and the request may be sent again. Every other error is the request's: it
        would fail again, and clients repeat what is answered 500.
        """
        if output.step_failed:
            message = "the engine failed while it computed this answer, and goes on: send the request again"
            raise ApiError(500, message, kind=SERVER, code="engine_error")
        if output.error is not None:
            logger.warning("request %s failed: %s", quoted(output.request_id), one_line(output.error, LONGEST))
            raise invalid(f"the request failed: {output.error}", code="request_failed")
        return output


async def _pump(
    number: int, stream: RequestStream, waiting: asyncio.Queue[tuple[int, RequestOutput | Exception]]
) -> None:
    try:
        async for output in stream:
            await waiting.put((number, output))
    except Exception as error:
        await waiting.put((number, error))


def _drop(adding: asyncio.Future[RequestStream]) -> None:
    """Abort a request that was added although another one of its HTTP request failed."""
    if not adding.cancelled() and adding.exception() is None:
        adding.result().close()


def _prompt(parts: PromptParts) -> dict[str, object]:
    return {"prompt_token_ids": parts.token_ids, "cache_salt": parts.cache_salt}
