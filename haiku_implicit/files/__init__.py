"""Checkpoints: trees with implicit arrays in safetensors files, and Haiku parameters in other files."""
