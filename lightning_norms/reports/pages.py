"""Pages from Jinja2 templates: everything that is not a template is escaped, and a page loads nothing."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_norms.reports.table import Column, Table


def render(template: str, **context: Any) -> str:
    """A whole page, which works offline, in a mail and on a phone.

    Args:
        template: name of a file in ``reports/templates``.
        context: what the template shows.
    """
    return printable(environment().get_template(template).render(context))


def stylesheet() -> str:
    """The one style sheet of all pages."""
    return environment().get_template("style.css").render()


def printable(text: str) -> str:
    r"""The text without what no HTML file may hold: control characters and halves of surrogate pairs.

    Example:
        >>> printable("a\x00b")
        'ab'
    """
    return re.sub(r"[^\n\t -\ud7ff\ue000-\U0010ffff]", "", text)


@cache
def environment() -> Environment:
    """The templates, with what they may call."""
    made = Environment(
        loader=PackageLoader("lightning_norms.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals["Column"], made.globals["Table"] = Column, Table
    made.tests["finite"] = math.isfinite
    made.filters["yaml"] = lambda patch: yaml.safe_dump(patch, sort_keys=False)
    return made
