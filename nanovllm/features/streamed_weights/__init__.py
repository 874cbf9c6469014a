"""Weights larger than the device: the matrices of some layers lie in host memory and stream through slots."""
