"""nanovllm compared with other engines: python -m benchmarks.peers."""
