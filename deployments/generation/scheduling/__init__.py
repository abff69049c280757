"""What is admitted, and what each step computes: by the time that steps take and the room in the cache. Pure."""
