"""The same failures under every kind of protection: who ends as if nothing had happened, and what it costs."""
