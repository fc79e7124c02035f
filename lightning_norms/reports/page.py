"""The shell of a page: titled sections under each other, in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.etree.ElementTree import Element

from lightning_norms.reports.elements import Content, element, html
from lightning_norms.reports.page_style import STYLE

LOADS_NOTHING = "default-src 'none'; style-src 'unsafe-inline'"
"""Even if a name smuggled in an address, the browser would not follow it."""


def page(title: str, top: Element, sections: Iterable[tuple[str, list[Content]]], style: str | None = None) -> str:
    """The whole page; it works offline, in a mail and on a phone.

    Args:
        title: of the window.
        top: what stands above the sections.
        sections: title and parts of each; one that has nothing is left out.
        style: rules of this page alone, after those of all.

    Example:
        >>> made = page("a < b", element("header", "top"), [("Full", ["seen"]), ("Empty", [None])])
        >>> "<h2>Full</h2>seen" in made, "<h2>Empty" in made, "<title>a &lt; b</title>" in made
        (True, False, True)
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="viewport", content_="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content_=LOADS_NOTHING),
        element("title", title),
        element("style", STYLE, style),
    )
    main = element("main", top, (_section(name, parts) for name, parts in sections))
    return f"<!DOCTYPE html>\n{html(element('html', head, element('body', main), lang='en'))}\n"


def _section(title: str, parts: list[Content]) -> Content:
    given = [part for part in parts if part is not None]
    return element("section", element("h2", title), given) if given else None


def pictures(figures: Iterator[Element]) -> Content:
    """Side by side where there is room; nothing if there are none."""
    drawn = list(figures)
    return element("div", drawn, class_="pictures") if drawn else None


def listed(kind: str, sentences: Iterable[str]) -> Content:
    """A list of sentences, "ul" or "ol"; nothing if there are none."""
    items = [element("li", sentence) for sentence in sentences]
    return element(kind, items) if items else None
