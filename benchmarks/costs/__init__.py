"""Small measurements of single steps: `python -m benchmarks.costs.NAME`."""
