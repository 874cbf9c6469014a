"""The command line: `nanovllm COMMAND`."""
