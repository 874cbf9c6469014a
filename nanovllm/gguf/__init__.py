"""GGUF files of llama.cpp as models, with their packed weights: a side, see `nanovllm.model_files.gguf_side`."""

from nanovllm.gguf.model import read_config
from nanovllm.gguf.tensors import list_tensors
from nanovllm.gguf.tokenizer import load_tokenizer

__all__ = ["list_tensors", "load_tokenizer", "read_config"]
