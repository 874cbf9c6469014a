"""nanovllm beside the engines that a user would pick instead, in one run: python -m benchmarks.peers."""
