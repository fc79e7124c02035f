"""One table for every reader: the console through rich, a page through its templates, and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

COLOURS = {"good": "green", "bad": "red", "open": "yellow", "soft": "dim", "": ""}
"""Tone of a cell -> its style on the console; a page has a class for each."""
WIDTH = 79
"""A console of 80 columns, less one that Windows needs."""


@dataclass(frozen=True)
class Column:
    """Title of a column, and what its cells hold."""

    title: str
    kind: str = ""
    """``number`` stands to the right; ``word`` is never broken; ``text`` is a sentence, which pages do not squeeze."""
    only_page: bool = False
    """Whether the console has no room for it."""


@dataclass(frozen=True)
class Cell:
    """A cell with more than its text."""

    text: str
    tone: str = ""
    _: KW_ONLY
    """One of :data:`COLOURS`."""
    note: str = ""
    """What the text is, below it on a page and after it elsewhere."""
    brief: str | None = None
    """What the console shows instead of the text and its note."""
    shade: int | None = None
    """Percent of colour behind it on a page."""


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    r"""Columns and rows; the first cell of a row names it. ``rich`` prints it as it is.

    Example:
        >>> columns = (Column("run"), Column("loss", "number"))
        >>> shown = Table("losses", columns, [("pre", "2.5"), ("a|b", Cell("3", "bad"))])
        >>> print(shown.markdown(), end="")
        | run | loss |
        | --- | --- |
        | pre | 2.5 |
        | a\|b | 3 |
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def cells(self) -> Iterator[list[tuple[Column, Cell]]]:
        """The cells of each row, with their columns."""
        for row in self.rows:
            cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
            yield list(zip(self.columns, cells, strict=True))

    def markdown(self) -> str:
        """The table as Markdown, with every column."""
        rows = [[_with_note(cell) for _, cell in row] for row in self.cells()]
        lines = ([column.title for column in self.columns], ["---"] * len(self.columns), *rows)
        return "".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |\n" for line in lines)

    def __rich__(self) -> RichTable:
        title = Text(self.title, "table.title")
        least = min(len(self.title), WIDTH)
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, min_width=least)
        for i, column in enumerate(self.columns):
            if not column.only_page:
                table.add_column(
                    Text(column.title, "table.header"),
                    justify="right" if column.kind == "number" else "left",
                    no_wrap=column.kind in ("number", "word"),
                    overflow="fold",
                    min_width=None if i else 12,
                )
        for row in self.cells():
            table.add_row(*(_text(cell) for column, cell in row if not column.only_page))
        return table


def _text(cell: Cell) -> Text:
    return Text(_with_note(cell) if cell.brief is None else cell.brief, COLOURS[cell.tone])


def _with_note(cell: Cell) -> str:
    return f"{cell.text}: {cell.note}" if cell.note else cell.text
