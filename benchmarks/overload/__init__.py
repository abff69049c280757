"""Any OpenAI endpoint for embeddings under 0.3 to 4 times the load it can take, timed at the client.

MLPerf's server scenario asks for the highest rate that a server sustains. This asks what becomes of a server beyond it:
goodput within the SLO, late and refused shares, the time to refuse, and whether Retry-After tells the truth.
"""
