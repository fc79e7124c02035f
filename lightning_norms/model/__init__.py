"""The decoder: torch only, never Lightning. Every published norm placement is one word of its configuration."""
