"""The calibration of an application that generates: step times, capacity, and the proof."""
