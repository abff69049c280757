"""The application that users see: its Serve config, its routes, and the `windve` command."""
