"""What tests and benchmarks share: virtual time, simulated devices and wires, fakes, small models."""
