"""Where norms sit: every published placement, by family."""
