"""Quantization of a tree of parameters: calibrated, or in training."""
