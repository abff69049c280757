"""Microbenchmarks of single operations: `python -m benchmarks.costs.NAME`."""
