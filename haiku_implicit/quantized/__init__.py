"""Quantized matrices: their layout, products, kernels and types."""
