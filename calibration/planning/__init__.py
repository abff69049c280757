"""Computes devices and money for a demand, from a report."""
