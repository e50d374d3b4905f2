"""Kernels of this library's own, where XLA's code generation has no good path."""
