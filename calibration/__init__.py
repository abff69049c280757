"""Calibration: measures what a query costs on a running application, proves the SLO, and updates its Serve config."""
