"""Turns requests into tokens and tokens into text: chat templates, options, sampling; and the small model."""
