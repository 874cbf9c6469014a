"""GGUF files in the place of a model directory: how the core knows one, and the side that reads them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from nanovllm.errors import ModelError
from nanovllm.side_modules import find_side

SUFFIX = ".gguf"


class GgufConfig(NamedTuple):
    """What a file says about the network.

    fields: as in config.json; generation: as in generation_config.json; rope_factors: what each RoPE frequency is
    divided by, or none; method: the `LinearMethod` of the matrices, None if all are plain numbers.
    """

    fields: dict[str, Any]
    generation: Mapping[str, Any]
    rope_factors: tuple[float, ...]
    method: Any


class NoTokenizerError(ModelError):
    """A file describes a network without its tokenizer."""


class GgufSide(Protocol):
    """Reads GGUF files. Every function raises ModelError for a file that is damaged or not supported."""

    def read_config(self, path: Path) -> GgufConfig: ...

    def load_tokenizer(self, path: Path) -> Any:
        """The tokenizer, a `fast_tokenizer.FastTokenizer`. Raises NoTokenizerError if the file describes none."""
        ...

    def list_tensors(self, path: Path) -> dict[str, Any]:
        """Each tensor as a `models.checkpoint.StoredTensor`, by its name in Hugging Face format."""
        ...


def is_gguf(path: object) -> bool:
    """Whether it is the path of a file in GGUF, by its ending."""
    try:
        return isinstance(path, str | Path) and Path(path).suffix.lower() == SUFFIX and Path(path).is_file()
    except (OSError, ValueError):  # such as a name that is too long
        return False


def gguf_side(path: str | Path) -> GgufSide:
    """The side that reads the file. Raises ModelError if it is not installed."""
    side = cast("GgufSide | None", find_side("nanovllm.formats.gguf"))
    if side is None:
        raise ModelError(f"{path}: GGUF files need nanovllm.formats.gguf, which this installation does not have.")
    return side
