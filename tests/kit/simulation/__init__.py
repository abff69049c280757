"""windve in virtual time: the product's own Router, Runner and Schedule over devices, cores and wires by formula."""
