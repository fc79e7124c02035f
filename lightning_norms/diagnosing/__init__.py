"""``diagnose``: a look at the first step, short trials of one change each, and what follows from them."""
