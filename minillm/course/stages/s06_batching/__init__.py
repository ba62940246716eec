"""Stage 06: batching. Many requests in one step, and who waits for whom."""

MINUTES = 35
