"""`python -m advisor.predict ROWS.csv OUT.csv`: a prediction for each row of a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from advisor.predict.prediction import predict, write_predictions
from advisor.predict.rows import read_rows
from profiles.errors import AdvisorError

USAGE = "usage: python -m advisor.predict ROWS.csv OUT.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 with the reason on standard error if a file is unusable."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}\n")
        return 0
    if len(given) != 2:
        sys.stderr.write(f"{USAGE}\n")
        return 2
    source, target = given
    try:
        write_predictions((predict(row) for row in read_rows(source)), target)
    except AdvisorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
