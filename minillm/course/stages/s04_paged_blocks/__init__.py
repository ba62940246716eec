"""Stage 04: paged blocks. Tables, fragmentation measured, copy-on-write, and attention that reads through a table."""

MINUTES = 35
