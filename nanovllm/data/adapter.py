"""What the engine knows of LoRA adapters: which one a request uses, and what finds it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Adapter:
    """One content of the files of an adapter.

    number: its identity within an engine, from 1; other content has another number. request: the `LoRARequest` that
    names it. stamp: sizes and times of its files, by which an executor recognises the content.
    """

    number: int
    request: Any
    stamp: tuple[int, ...]


class Adapters(Protocol):
    """Finds the adapters that requests name."""

    def find(self, lora_request: object) -> Adapter:
        """The adapter of a `LoRARequest`. Raises RequestError if it cannot be used with the model."""
        ...
