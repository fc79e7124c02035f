"""lightning_norms."""
