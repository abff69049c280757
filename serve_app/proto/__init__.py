"""gRPC messages, TEI's and those of generation: what `make proto` makes of *.proto. Do not edit generated files."""
