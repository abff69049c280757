"""The command `windve`: each subcommand is a module with `main(words)`, which is imported only when it is called."""
