"""Stage 03: attention. Heads that share their keys, and scores that never exist all at once."""

MINUTES = 40
