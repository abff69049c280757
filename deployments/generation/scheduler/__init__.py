"""The generations of one device: which it admits, and what each step computes. Pure: no ray, no torch, no clock."""
