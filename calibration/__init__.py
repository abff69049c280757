"""Calibration: measures what a query costs a running application, proves the SLO, writes both into its Serve config."""
