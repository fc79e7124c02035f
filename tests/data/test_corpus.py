import sysconfig
from pathlib import Path

import pytest

from lightning_norms.data import corpus
from lightning_norms.data.corpus import Corpus, Document, embedded, from_files


def test_the_code_is_the_top_level_modules_of_the_standard_library_in_sorted_order():
    names = [Path(document.name).name for document in embedded("code").documents]
    assert {"abc.py", "argparse.py", "zipfile.py"} & set(names) == {"abc.py", "argparse.py"} | (
        {"zipfile.py"} & set(names)
    )
    assert names == sorted(names)
    assert embedded("code").size == sum(p.stat().st_size for p in Path(sysconfig.get_path("stdlib")).glob("*.py"))


def test_a_python_without_sources_gives_one_sentence_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(corpus.EMBEDDED, "code", lambda: iter(()))
    with pytest.raises(FileNotFoundError, match=r"ships no 'code' text .* give data.train"):
        embedded("code")


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match=r"\['code', 'prose'\], not 'poems'"):
        embedded("poems")


def test_the_fingerprint_depends_on_bytes_and_their_order_and_not_on_names():
    def fingerprint(*texts, names="abc"):
        return Corpus("x", tuple(map(Document.of_text, names, texts))).fingerprint

    assert fingerprint("one", "two") == fingerprint("one", "two", names="yz")
    assert len({fingerprint("one", "two"), fingerprint("two", "one"), fingerprint("onet", "wo")}) == 3


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.txt").write_text("ay")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.md").write_text("sea")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    return tmp_path


def names(corpus, folder):
    return [str(Path(document.name).relative_to(folder)) for document in corpus.documents]


def test_a_folder_stands_for_its_visible_files_sorted_and_empty_ones_are_passed_over(folder):
    assert names(from_files("train", str(folder)), folder) == ["a.txt", "b.txt", "deep/c.md"]


def test_globs_and_lists_are_sorted_too_and_each_file_comes_once(folder):
    given = [str(folder / "b.txt"), str(folder / "**" / "*.md"), str(folder / "*.txt")]
    assert names(from_files("train", given), folder) == ["a.txt", "b.txt", "deep/c.md"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "x[1].txt").write_text("bracket")
    assert from_files("train", str(tmp_path / "x[1].txt")).size == 7


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("missing.txt", FileNotFoundError, "'train': there is no file or folder '.*missing.txt'"),
        ("*.nothing", FileNotFoundError, "'train': the glob '.*nothing' matches no file"),
        ("hollow", FileNotFoundError, "'train': the folder '.*hollow' holds no file"),
        ("empty.txt", ValueError, r"'train' has no text: .*empty.txt is empty \(0 bytes\)"),
    ],
)
def test_what_stands_for_no_text_is_one_sentence(folder, given, error, message):
    (folder / "hollow").mkdir()
    with pytest.raises(error, match=message):
        from_files("train", str(folder / given))
