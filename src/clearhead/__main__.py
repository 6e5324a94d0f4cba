"""``python -m clearhead`` is ``clearhead``."""

from clearhead.cli import main

main()
