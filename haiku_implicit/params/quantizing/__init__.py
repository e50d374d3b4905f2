"""Quantization of a tree of parameters: stored, calibrated, or in training."""
