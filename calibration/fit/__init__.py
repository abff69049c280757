"""Fits a burst's latency by its size (Eq. 12) and a query's cost by its length; chooses the next burst. Pure."""
