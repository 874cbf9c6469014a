"""GGUF files of llama.cpp as models, with their packed weights: a side, see `nanovllm.formats.gguf_side`."""

from nanovllm.formats.gguf.model import read_config
from nanovllm.formats.gguf.tensors import list_tensors
from nanovllm.formats.gguf.tokenizer import load_tokenizer

__all__ = ["list_tensors", "load_tokenizer", "read_config"]
