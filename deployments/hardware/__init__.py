"""Finds a machine's devices (Algorithm 2), and assigns its cores (Section IV-D)."""
