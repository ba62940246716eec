"""Stage 08: sampling and streaming. From scores to a token, from tokens to text that is never taken back."""

MINUTES = 40
