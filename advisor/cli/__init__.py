"""The command line: `advise` and its subcommands.

Lives here: options, streams, exit codes, errors in one form. Must not: anything that a caller
from Python would want; commands call functions of the other packages and print what they return.
"""
