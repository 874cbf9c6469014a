"""Files of models: checkpoints, GGUF, quantized weights, strict JSON."""
