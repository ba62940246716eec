"""Stage 07: scheduling. Who computes how much in the next step, and who waits."""

MINUTES = 40
