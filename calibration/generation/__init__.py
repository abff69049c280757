"""The calibration of an application that generates: what its steps take, how much it can take, and the proof."""
