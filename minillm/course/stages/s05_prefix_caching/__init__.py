"""Stage 05: prefix caching. Compute a beginning once, find it again by name, and know when it may be thrown away."""

MINUTES = 35
