"""Numbers to tables and pictures: plain data in, no Lightning."""
