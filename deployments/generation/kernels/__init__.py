"""The C of the CPU engine, and its loading: attention of answers, products, and what lies between them."""
