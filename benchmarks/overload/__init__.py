"""Measures any OpenAI endpoint for embeddings at 0.3 to 4 times its capacity, timed at the client.

MLPerf's server scenario finds the highest rate that a server sustains. This measures a server beyond it: goodput within
the SLO, late and refused shares, the time to refuse, and whether Retry-After is accurate.
"""
