"""Admission of queries and of generations: quotas, fair shares, and the learned predictor. Pure."""
