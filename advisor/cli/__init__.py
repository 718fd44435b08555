"""The command line: `advise` and its subcommands.

Options, streams, exit codes and error formatting. Commands call functions of the other packages and
print their results.
"""
