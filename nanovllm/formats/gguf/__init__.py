"""GGUF files of llama.cpp as models, with their packed weights."""
