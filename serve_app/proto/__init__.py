"""TEI's gRPC messages: `tei.proto`, and what `make proto` makes of it. Do not edit the generated files."""
