"""What any admission needs, of queries or of generations: quotas, shares, trials, what is learned. Pure."""
