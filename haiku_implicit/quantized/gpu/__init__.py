"""The product with a quantized matrix on NVIDIA GPUs: Pallas kernels."""
