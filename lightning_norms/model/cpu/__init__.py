"""Code that is only there to be fast on a processor."""
