"""Stage 01: why reading a prompt is fast and writing is slow. FLOPs, bytes and the roofline of the reader's machine."""

MINUTES = 30
