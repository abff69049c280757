"""`windve serve`: starts a local Ray, serves on it, and prints the progress to the terminal."""
