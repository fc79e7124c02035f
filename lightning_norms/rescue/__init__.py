"""Keeping a run alive: what is wrong, what to do, and the state to go back to."""
