"""Texts that must stay exactly as they are.

REGEN_GOLDEN=1 writes the files anew; read the difference before it is kept.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    """Compare `text` with tests/golden/`name`, byte for byte."""
    path = FOLDER / name
    if os.environ.get("REGEN_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no golden file {path}: run once with REGEN_GOLDEN=1"
    assert text == path.read_text(encoding="utf-8")
