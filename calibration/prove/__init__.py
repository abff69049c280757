"""All pools at work: fine-tuning, the verification, and the proof by streams."""
