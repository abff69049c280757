"""windve in virtual time: its real Router, run loop and scheduler over simulated devices, cores and networks."""
