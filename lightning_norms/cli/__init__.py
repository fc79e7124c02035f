"""The command line: `python -m lightning_norms`."""
