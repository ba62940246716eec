"""Stage 02: the KV cache. Keep what would be computed again, and know what keeping it costs."""

MINUTES = 35
