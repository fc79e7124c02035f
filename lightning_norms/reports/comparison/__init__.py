"""What a comparison shows: console, page, Markdown and figures."""
