"""The queue of one device: what it admits and what runs next. Pure: no ray, no torch, no clock."""
