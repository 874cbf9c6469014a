"""Finds the adapters that requests name, and checks each content of their files once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nanovllm.data.batch import Adapter
from nanovllm.errors import ConfigError, ModelError, RequestError, quoted
from nanovllm.features.lora.adapter_files import read_adapter, stamp_of
from nanovllm.features.lora.request import LoRARequest
from nanovllm.models.spec import DecoderSpec


class AdapterRegistry:
    """Numbers adapters by the path and the stamp of their files. See `data.adapter.Adapters`.

    So a request never shares blocks of the prefix cache, or a copy on the device, with one that named other content.
    """

    def __init__(self, spec: DecoderSpec, max_lora_rank: int) -> None:
        self._spec = spec
        self._max_lora_rank = max_lora_rank
        self._known: dict[tuple[str, tuple[int, ...]], Adapter] = {}
        self._paths: dict[int, str] = {}  # by lora_int_id

    def find(self, lora_request: object) -> Adapter:
        """The adapter of a `LoRARequest`. Raises RequestError."""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(
                f"lora_request={quoted(lora_request)}: must be a LoRARequest of nanovllm.features.lora.request, or None"
            )
        try:
            return self._find(lora_request)
        except (ModelError, ConfigError) as error:  # ConfigError: the file cannot be mapped
            sentence = str(error).removesuffix(".")
            raise RequestError(f"the adapter {quoted(lora_request.lora_name)} cannot be used: {sentence}") from error

    def _find(self, lora_request: LoRARequest) -> Adapter:
        path = Path(lora_request.lora_path).expanduser().resolve()
        stamp = stamp_of(path)
        other = self._paths.get(lora_request.lora_int_id, str(path))
        if other != str(path) and not lora_request.load_inplace:
            raise RequestError(
                f"lora_int_id={lora_request.lora_int_id} of {quoted(lora_request.lora_name)} belongs to the adapter in "
                f"{other}: give every adapter an id of its own, or load_inplace=True to replace it"
            )
        found = self._known.get((str(path), stamp))
        if found is None:
            read_adapter(path, self._spec, self._max_lora_rank)
            found = Adapter(len(self._known) + 1, lora_request, stamp)
            self._known[str(path), stamp] = found
        self._paths[lora_request.lora_int_id] = str(path)
        return replace(found, request=lora_request)
