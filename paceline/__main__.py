"""`python -m paceline`: the same as the command, for launchers that start modules."""

from paceline.cli.main import main

main()
