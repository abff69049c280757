"""Bursts and streams on the running application, kept as they land."""
