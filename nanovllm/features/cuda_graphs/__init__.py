"""CUDA graphs of decode steps."""

from nanovllm.features.cuda_graphs.decode_graphs import graph_bytes, record_decode_graphs

__all__ = ["graph_bytes", "record_decode_graphs"]
