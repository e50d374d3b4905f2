"""What the library costs: `python -m benchmarks.run`, described in `docs/benchmarks.md`."""
