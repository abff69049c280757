"""Code that comparisons share: rounds and samples, load generators, tables, goals, processes, CPU time."""
