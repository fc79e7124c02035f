"""Files that a run leaves, on a disk or at a URL."""
