"""Devices and money, from a report."""
