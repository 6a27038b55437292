"""`python -m ucpl` is `ucpl`."""

from ucpl.cli import command

command()
