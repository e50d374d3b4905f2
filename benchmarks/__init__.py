"""The library's costs: `python -m benchmarks.run`, described in `docs/benchmarks.md`."""
