"""Decides which generations a device admits, and what each step computes. Pure: no ray, no torch, no clock."""
