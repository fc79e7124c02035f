"""``python -m lightning_norms``."""

from lightning_norms.cli import main

if __name__ == "__main__":
    main()
