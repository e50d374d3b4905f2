"""Quantized matrices: how they are stored, their products, kernels and types."""
