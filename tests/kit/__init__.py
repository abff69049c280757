"""Code that tests and benchmarks share: virtual time, simulated devices and networks, fakes, small models."""
