"""`make serve`: a Ray of our own on this machine, and what the person at the desk sees."""
