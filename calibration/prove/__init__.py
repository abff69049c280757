"""Tests with all pools loaded: fine-tuning, verification, and the proof by streams."""
