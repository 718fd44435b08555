"""`python -m tests.trust`: write the table of the README and the picture from what is committed.

--check         write nothing; exit code 1 and the lines that differ, if any do
--from FOLDER   take the reports of `tests/validation` from FOLDER, and print the table
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.trust.claim import Files
from tests.trust.page import PICTURE, table, write, wrong
from tests.trust.picture import drawn


def main(words: list[str]) -> int:
    given = _parser().parse_args(words)
    if given.folder:
        files = Files(given.folder)
        (given.folder / PICTURE.name).write_text(drawn(files), encoding="utf-8")
        sys.stdout.write(table(files))
        return 0
    if given.check:
        lines = wrong(Files())
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return int(bool(lines))
    write(Files())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
