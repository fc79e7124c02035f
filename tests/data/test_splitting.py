import pytest

from lightning_norms.data.corpus import Corpus, Document, embedded
from lightning_norms.data.splitting import LONGEST_CHUNK_BYTES, Part, Split, chunks


def document(data: bytes, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    return Document.of_file(path)


@pytest.mark.parametrize("size", [1, 5, 4096])
def test_chunks_end_with_a_line_and_join_to_the_text(size):
    text = "one\r\n\n\ntwo\nthree é 😀\nno end of line"
    pieces = list(chunks(Document.of_text("x", text), size))
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert all(len(piece.encode()) >= size for piece in pieces[:-1])


def test_a_long_line_is_cut_between_characters(tmp_path):
    text = "x" + "😀" * (5 * 2**20 // 4)  # one line of 5 MB, where every cut would fall inside a character
    pieces = list(chunks(document(text.encode(), tmp_path)))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= LONGEST_CHUNK_BYTES
    assert len(pieces) == 81


def test_a_byte_order_mark_is_dropped_and_the_rest_is_kept(tmp_path):
    assert "".join(chunks(document(b"\xef\xbb\xbfa\r\nb\n\xef\xbb\xbf", tmp_path))) == "a\r\nb\n\ufeff"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"fine\nit\x92s\n", r"text.txt: byte 0x92 at position 7 is not UTF-8"),
        (b"\xef\xbb\xbfit\x92s\n", r"text.txt: byte 0x92 at position 5 is not UTF-8"),
        (b"line\n" * 2000 + b"\xff", r"text.txt: byte 0xff at position 10000 is not UTF-8"),
        (b"line\n" * 2000 + "é".encode()[:1], r"text.txt: byte 0xc3 at position 10000 is not UTF-8"),
        (b"line\n" * 2000 + b"a\0b", r"text.txt: NUL byte at position 10001"),
        (b"\x80" * 200_000, r"text.txt: byte 0x80 at position 0 is not UTF-8"),
        ("text".encode("utf-16"), r"text.txt: byte 0xff at position 0 is not UTF-8"),
    ],
)
def test_what_is_no_text_is_named_with_file_and_position(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        list(chunks(document(data, tmp_path)))


def both_sides(corpus, split):
    return [list(Part(corpus, split, validation).pieces()) for validation in (False, True)]


def test_the_sides_are_disjoint_and_together_are_the_text():
    corpus = embedded("prose")
    train, val = both_sides(corpus, Split(0.1))
    assert sum(len(text.encode()) for _, text in train + val) == corpus.size
    whole = [text for _, text in Part(corpus).pieces()]
    assert sorted(text for _, text in train + val) == sorted(whole)
    assert 0.05 < sum(len(text) for _, text in val) / corpus.size < 0.15


def test_neighbours_on_one_side_are_one_document():
    lines = [f"line {number:059d}\n" for number in range(64)]  # 65 bytes each: one chunk a line
    corpus = Corpus("notes", (Document.of_text("a", "".join(lines[:32])), Document.of_text("b", "".join(lines[32:]))))
    train, val = both_sides(corpus, Split(0.3))
    is_val = [Split(0.3).is_validation("notes", index) for index in range(64)]
    assert [text for _, text in val] == [line for line, mine in zip(lines, is_val, strict=True) if mine]
    starts = [index in (0, 32) or is_val[index] != is_val[index - 1] for index in range(64)]
    assert [start for start, _ in train] == [s for s, mine in zip(starts, is_val, strict=True) if not mine]


def test_another_seed_or_corpus_draws_other_chunks():
    def drawn(split, name):
        return [index for index in range(300) if split.is_validation(name, index)]

    assert len({tuple(drawn(*of)) for of in [(Split(0.1), "a"), (Split(0.1, 1), "a"), (Split(0.1), "b")]}) == 3
    assert drawn(Split(0.1), "code") == [i for i in range(300) if Split(0.1, 0).is_validation("code", i)]
    assert set(drawn(Split(0.1), "a")) < set(drawn(Split(0.2), "a"))
