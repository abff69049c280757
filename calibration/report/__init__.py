"""What a calibration found: one typed model, pictures, tables, a page."""
