"""What runs in replicas: the Router, the embedders, and the pure decisions they share."""
