"""Tests with all pools loaded: verification, and the proof by streams."""
