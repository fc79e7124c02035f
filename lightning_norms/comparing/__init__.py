"""``compare``: a grid of variants by seeds, run as ordinary fits that go on where they were stopped."""
