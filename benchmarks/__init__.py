"""Benchmarks, started by hand. Each is a paired comparison in one run, with raw samples, a table and a picture."""
