"""Products with quantized operands, forward and backward, and the kernels that compute them."""
