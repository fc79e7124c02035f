"""One table, three readers."""

import io

from rich.console import Console

from lightning_norms.reports.pages import environment
from lightning_norms.reports.table import Cell, Column, Table

COLUMNS = (Column("run [x]"), Column("loss", "number"), Column("end", "word"), Column("why", "text", only_page=True))
ROWS = [("a|b", "2.5", Cell("✗ dies", "bad", brief="dies"), "it <b>"), (Cell("pre", note="as it was"), "", "", "")]
TABLE = Table("the [red]title[/]", COLUMNS, ROWS)


def printed(table, width=80):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table)
    return console.file.getvalue()


def test_on_the_console_a_bracket_is_a_bracket_and_a_cell_is_brief():
    lines = [line.split() for line in printed(TABLE).splitlines() if line.strip()]
    assert lines[0] == ["the", "[red]title[/]"]
    assert lines[1] == ["run", "[x]", "loss", "end"]
    assert lines[3:] == [["a|b", "2.5", "dies"], ["pre:", "as", "it", "was"]]


def test_names_give_way_and_numbers_and_words_never_break():
    rows = [("a name of very many words " * 5, "-123.456 ± 0.001", "stalls silently")]
    text = printed(Table("t", COLUMNS[:3], rows))
    assert "-123.456 ± 0.001" in text
    assert "stalls silently" in text
    assert max(map(len, text.splitlines())) <= 80


def test_markdown_has_every_column():
    assert TABLE.markdown().splitlines() == [
        "| run [x] | loss | end | why |",
        "| --- | --- | --- | --- |",
        "| a\\|b | 2.5 | ✗ dies | it <b> |",
        "| pre: as it was |  |  |  |",
    ]


def test_on_a_page_cells_are_escaped_named_and_coloured():
    html = str(environment().get_template("macros.html").module.table(TABLE))
    assert '<td class="number" data-label="loss">2.5</td>' in html
    assert '<b class="bad">✗ dies</b>' in html
    assert "it &lt;b&gt;" in html
    assert '<div class="soft">as it was</div>' in html
    assert '<td class="text" data-label="why"></td>' in html  # empty, so that a phone leaves it out
    assert str(environment().get_template("macros.html").module.table(Table("t", COLUMNS, []))).strip() == ""
