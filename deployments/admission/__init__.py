"""Admission of queries and of generations: quotas, fair shares, trials, and the learned predictor. Pure."""
