"""One quantity against the time of a step: `advise sweep`."""
