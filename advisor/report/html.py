"""ReportView as one HTML page: no script, no external resource, every name escaped."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from advisor.report.view import ReportView, view_of

if TYPE_CHECKING:
    from advisor.decide.decision import Decision


def page(decision: Decision) -> str:
    """Render the report of `decision` as a self-contained page that opens offline and prints."""
    return _render(view_of(decision), whole=True)


def fragment(view: ReportView) -> str:
    """Render the same content without head and body, for notebooks."""
    return _render(view, whole=False)


def _render(view: ReportView, *, whole: bool) -> str:
    from jinja2 import Environment, StrictUndefined

    source = files("advisor.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(view=view, whole=whole)
