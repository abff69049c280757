"""The report of a calibration: one typed model, pictures, tables, a page."""
