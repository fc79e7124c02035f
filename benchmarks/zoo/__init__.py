"""Many small training runs, healthy and sick, whose outcome is known because each was run for real."""
