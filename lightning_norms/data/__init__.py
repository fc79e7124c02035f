"""Text for language models: corpora, tokens, and batches whose order is a pure function of (seed, step, rank)."""
