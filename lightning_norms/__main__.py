"""``python -m lightning_norms``."""

from lightning_norms.cli.main import main

if __name__ == "__main__":
    main()
