"""Each rule of admission, order, placing, retries and learning off by itself."""
