"""`python -m sqlguard`: the same as the command `sqlguard`."""

from sqlguard.cli import main

main()
