"""CUDA graphs of decode steps: a side of the engine, see `nanovllm.engine.sides.CudaGraphs`."""

from nanovllm.features.cuda_graphs.decode_graphs import graph_bytes, record_decode_graphs

__all__ = ["graph_bytes", "record_decode_graphs"]
