"""Tests: unit (pure code), models (engines against transformers), e2e (real Ray), faults (`make soak`)."""
