"""HTTP, whatever the model is for."""
