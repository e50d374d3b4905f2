"""The product with a quantized matrix on CPUs: C++ kernels, compiled at first use."""
