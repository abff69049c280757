"""HTTP code that all kinds of models share."""
