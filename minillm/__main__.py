"""`python -m minillm` is the `minillm` command."""

from .cli import main

main()
