"""Stage 00: first text from a real model, the four numbers that every engine is judged by, and how checks work."""

MINUTES = 30
