"""The table of all claims, and its place in the README beside the picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.trust.choice import CLAIMS as CHOICE
from tests.trust.claim import Files
from tests.trust.endurance import CLAIMS as ENDURANCE
from tests.trust.estimates import CLAIMS as ESTIMATES
from tests.trust.picture import drawn
from tests.trust.training import CLAIMS as TRAINING

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PICTURE = ROOT / "tests" / "validation" / "trust.svg"
BLOCK = re.compile(
    r"(<!-- trust: written by `python -m tests.trust` -->\n)(.*?)(<!-- end of trust -->)", re.DOTALL
)
CLAIMS = (*CHOICE, *ESTIMATES, *TRAINING, *ENDURANCE)
SHOWN = (
    "![Predicted against measured; our choice against the best plan; our speed beside others]"
    "(tests/validation/trust.svg)"
)


def table(files: Files) -> str:
    """Markdown: a line a claim."""
    return "\n".join(_lines(files)) + "\n"


def _lines(files: Files) -> Iterator[str]:
    yield "| | what was measured | where it falls short | command |"
    yield "|---|---|---|---|"
    for claim in CLAIMS:
        answer = claim.of(files)
        cells = (claim.question, answer.result, answer.short, f"`{claim.command}`")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def block(files: Files) -> str:
    """Everything between the marks of the README."""
    return f"{table(files)}\n{SHOWN}\n\n{where(files)}\n"


def where(files: Files) -> str:
    """Cores, versions of torch and days of the reports that say theirs."""
    reports = [report for claim in CLAIMS if (report := files.read(claim.path, claim.load))]
    documents = [*reports, *(each for report in reports for each in getattr(report, "results", ()))]

    def of(name: str, pattern: str) -> list[str]:
        texts = [str(getattr(document, name, "")) for document in documents]
        return sorted({match[1] for text in texts if (match := re.search(pattern, text))})

    days = of("measured_at", r"^(\d{4}-\d\d-\d\d)")
    span = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "not measured yet"
    cores, versions = of("machine", r"(\d+) cores"), of("torch", r"^([\d.]+)")
    return f"{', '.join(cores)} cores; torch {', '.join(versions)}; {span}."


def wrong(files: Files, *, readme: Path = README, picture: Path = PICTURE) -> list[str]:
    """Lines of the README, and the picture, that are not what the reports say."""
    shown = BLOCK.search(readme.read_text(encoding="utf-8"))
    if shown is None:
        return [f"{readme.name} has no place for the table: {BLOCK.pattern}"]
    old, new = shown[2].splitlines(), block(files).splitlines()
    lines = [f"- {line}" for line in old if line not in new]
    lines += [f"+ {line}" for line in new if line not in old]
    if not picture.exists() or picture.read_text(encoding="utf-8") != drawn(files):
        lines.append(f"{picture.name} is another picture")
    return lines


def write(files: Files, *, readme: Path = README, picture: Path = PICTURE) -> None:
    """Put the table in its place, and the picture in its file."""
    text = readme.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda match: match[1] + block(files) + match[3], text)
    readme.write_text(new, encoding="utf-8")
    picture.write_text(drawn(files), encoding="utf-8")
