"""HTML and SVG from plain Python: elements that are closed and escaped by construction.

::

    element("p", "a < b", element("b", "!"))   ->   <p>a &lt; b<b>!</b></p>
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Content = str | Element | Iterable["Content"] | None
"""What stands inside an element; None is nothing."""


def element(name: str, *content: Content, **attributes: object) -> Element:
    """An element with its content in order.

    Args:
        name: of the tag.
        content: text, elements, or iterables of them.
        attributes: an underscore is a hyphen, one at the end falls away (``class_``); None is no attribute.

    Example:
        >>> html(element("p", "a < b", element("b", "!"), class_="x", aria_label='"'))
        '<p class="x" aria-label="&quot;">a &lt; b<b>!</b></p>'
    """
    kept = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    made = Element(name, {key: _clean(str(value)) for key, value in kept.items()})
    for each in _flat(content):
        if isinstance(each, Element):
            made.append(each)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + each
        else:
            made.text = (made.text or "") + each
    return made


def html(root: Element) -> str:
    """The text of an element, in HTML's way of closing tags."""
    return tostring(root, encoding="unicode", method="html")


def table(
    head: Iterable[str], rows: Iterable[Iterable[Content]], numbers: Iterable[int] = (), texts: Iterable[int] = ()
) -> Element:
    """A table in a box of its own, which scrolls sideways by itself where it is too wide; focusable, for the keyboard.

    On a phone every row is a list of its cells, each with the title of its column.

    Args:
        head: titles of the columns.
        rows: their cells; the first of a row names it.
        numbers: columns that are set to the right.
        texts: columns of sentences, which are never squeezed to a word a line.
    """
    titles = list(head)
    classes = dict.fromkeys(numbers, "number") | dict.fromkeys(texts, "text")

    def cell(column: int, content: Content) -> Element:
        kind = {"scope": "row"} if column == 0 else {}
        name, label = ("td", titles[column]) if column else ("th", None)
        return element(name, content, class_=classes.get(column), data_label=label, **kind)

    body = [element("tr", (cell(i, content) for i, content in enumerate(row))) for row in rows]
    first = (element("th", title, scope="col", class_=classes.get(i)) for i, title in enumerate(titles))
    made = element("table", element("thead", element("tr", first)), element("tbody", body))
    return element("div", made, class_="wide", tabindex=0, role="group", aria_label="table")


def figure(title: str, picture: Content, caption: Content) -> Element:
    """A picture with its title above and what it shows below."""
    return element("figure", element("h3", title), picture, element("figcaption", caption))


def _flat(content: Content) -> Iterable[str | Element]:
    if content is None:
        return
    if isinstance(content, str | Element):
        yield content if isinstance(content, Element) else _clean(content)
        return
    for each in content:
        yield from _flat(each)


def _clean(text: str) -> str:
    """Without what cannot stand in a file of HTML: control characters and halves of surrogate pairs."""
    kept = (c for c in text if c in "\n\t" or (ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000))
    return "".join(kept)
