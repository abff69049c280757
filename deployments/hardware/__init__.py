"""What a machine has: its devices (Algorithm 2) and its cores (Section IV-D)."""
