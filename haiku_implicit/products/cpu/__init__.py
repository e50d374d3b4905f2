"""The product with a quantized matrix on CPUs: a C++ kernel, compiled at first use."""
