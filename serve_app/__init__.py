"""The application as seen from outside: its Serve config, its routes, and the command that serves it."""
