"""The product with a quantized matrix on NVIDIA GPUs: a Pallas kernel."""
