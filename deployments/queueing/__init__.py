"""The queue of one device: what it admits, what runs next, what it learns. Pure: no ray, no torch, no clock."""
