"""Checks and measurements on an NVIDIA GPU: `bash benchmarks/gpu/run.sh`."""
