"""What a diagnosis shows: console, page and figures."""
