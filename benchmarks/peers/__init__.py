"""The servers that windve is compared with. Each module runs in its own environment (NAME.txt), without windve."""
