"""Sends bursts and streams to the running application, and saves each result at once."""
