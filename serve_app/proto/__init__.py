"""gRPC messages of TEI and of generation. `make proto` generates them from *.proto. Do not edit generated files."""
