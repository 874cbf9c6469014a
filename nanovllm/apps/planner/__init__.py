"""The configs of published models, which `nanovllm plan` knows by name."""
