"""Calibration: finds the queue depths of a running application, proves them, and writes them into its Serve config."""
