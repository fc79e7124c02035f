import hashlib
import json
import multiprocessing
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lightning_norms.data.corpus import Corpus, Document, embedded
from lightning_norms.data.encoding import build_tokenizer, cache_folder, encode
from lightning_norms.data.splitting import Part, Split
from lightning_norms.data.tokenizing import BytePairTokenizer, ByteTokenizer
from lightning_norms.data.tokens import BytePairs, Bytes


def part(*texts):
    return Part(Corpus("notes", tuple(Document.of_text(str(number), text) for number, text in enumerate(texts))))


def test_the_stream_is_boundary_document_boundary_document(tmp_path):
    stream = encode([part("ab", "é"), part("c")], ByteTokenizer(), tmp_path)
    assert stream.array.tolist() == [0, 97, 98, 0, 195, 169, 0, 99]
    assert stream.array.dtype == np.uint8
    assert len(stream) == 8
    assert stream.counts[0] == 3
    assert sum(stream.counts) == 8


def test_more_than_256_tokens_take_two_bytes_each(tmp_path):
    tokenizer = build_tokenizer(BytePairs(vocab_size=300), [part("ab " * 50)], tmp_path)
    assert encode([part("ab " * 50)], tokenizer, tmp_path).array.dtype == np.uint16


def test_a_second_run_reads_the_file_of_the_first(tmp_path, monkeypatch):
    first = encode([part("ab")], ByteTokenizer(), tmp_path)
    monkeypatch.setattr(ByteTokenizer, "encode_array", None)
    assert encode([part("ab")], ByteTokenizer(), tmp_path).array.tolist() == first.array.tolist()
    assert {path.name for path in tmp_path.iterdir()} == {first.path.name, first.path.with_suffix(".json").name}


@pytest.mark.parametrize(
    ("recipe", "name", "content"),
    [
        (Bytes(), "68a8bc14f1714548c3df55766e5f6779.npy", "8ad3716f07f1dd6a"),
        (BytePairs(vocab_size=300), "", "e620236e501eafed"),  # the name holds the library's own description
    ],
    ids=["bytes", "pairs"],
)
def test_what_is_written_is_what_this_format_always_was(tmp_path, recipe, name, content):
    """Whoever changes a byte of it changes FORMAT, or runs on two machines with two versions read other tokens."""
    text = "".join(f"line {number}: é and 日本語\n" for number in range(400))
    parts = [Part(part(text, "one\n").corpus, Split(0.3))]
    stream = encode(parts, build_tokenizer(recipe, parts, tmp_path), tmp_path)
    assert stream.path.name.startswith(name)
    assert hashlib.sha256(stream.array.tobytes()).hexdigest().startswith(content)


def file_backed():
    """MB of this process's memory that are pages of files."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssFile")) / 1000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what memory is")
def test_a_file_is_encoded_in_a_few_megabytes_however_long_it_is(tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes(b"".join(b"%d is a number\n" % number for number in range(1_000_000)))
    assert file.stat().st_size > 18e6
    parts = [Part(Corpus("long", (Document.of_file(file),)))]
    before = file_backed()
    tracemalloc.start()
    try:
        stream = encode(parts, ByteTokenizer(), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(stream) == file.stat().st_size + 1
    assert peak < 8e6
    assert file_backed() - before < 8


def test_text_split_and_tokenizer_each_make_another_file(tmp_path):
    corpus = part("ab\n" * 99).corpus
    pairs = build_tokenizer(BytePairs(vocab_size=260), [Part(corpus)], tmp_path)
    streams = [
        encode([Part(corpus)], ByteTokenizer(), tmp_path),
        encode([part("ab\n" * 98)], ByteTokenizer(), tmp_path),
        encode([Part(corpus, Split(0.5))], ByteTokenizer(), tmp_path),
        encode([Part(corpus, Split(0.5), validation=True)], ByteTokenizer(), tmp_path),
        encode([Part(corpus, Split(0.5, 1))], ByteTokenizer(), tmp_path),
        encode([Part(corpus)], pairs, tmp_path),
    ]
    assert len({stream.path for stream in streams}) == 6


@pytest.mark.parametrize("ending", [".npy", ".json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data[len(data) // 2 :],
        lambda data: b"X" + data[1:],
        lambda data: data[:100] + data,
    ],
    ids=["empty", "tiny", "last byte", "first half", "one byte", "longer"],
)
def test_a_damaged_file_is_made_again(tmp_path, damage, ending):
    stream = encode([part("abcdef" * 50)], ByteTokenizer(), tmp_path)
    tokens, path = stream.array.tolist(), stream.path.with_suffix(ending)
    whole = path.read_bytes()
    path.unlink()  # the map of the first stream keeps the old content
    path.write_bytes(damage(whole))
    again = encode([part("abcdef" * 50)], ByteTokenizer(), tmp_path)
    assert (again.array.tolist(), again.counts) == (tokens, stream.counts)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("ending", [".npy", ".json"])
def test_a_missing_half_is_made_again(tmp_path, ending):
    path = encode([part("ab")], ByteTokenizer(), tmp_path).path.with_suffix(ending)
    path.unlink()
    assert encode([part("ab")], ByteTokenizer(), tmp_path).array.tolist() == [0, 97, 98]
    assert path.exists()


def test_the_file_is_one_that_numpy_reads(tmp_path):
    stream = encode([part("ab" * 5000)], ByteTokenizer(), tmp_path)
    array = np.load(stream.path)
    assert (array.shape, array.dtype, len(stream)) == ((10_001,), np.dtype("u1"), 10_001)


def test_a_failed_encoding_leaves_no_file(tmp_path):
    bad = Part(Corpus("bad", (Document("bad.txt", 3, lambda: __import__("io").BytesIO(b"a\xff\n")),)))
    with pytest.raises(ValueError, match=r"bad.txt: byte 0xff at position 1"):
        encode([bad], ByteTokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def _encode(folder, barrier, results):
    barrier.wait()
    results.put(encode([Part(embedded("prose"))], ByteTokenizer(), folder).array[:1000].tobytes())


@pytest.mark.slow
def test_two_processes_may_start_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_encode, args=(tmp_path, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert results.get(timeout=120) == results.get(timeout=120)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_learnt_tokenizer_is_read_from_the_cache_and_learnt_again_if_damaged(tmp_path, monkeypatch):
    recipe, text = BytePairs(vocab_size=260), [part("ab ab ab")]
    first = build_tokenizer(recipe, text, tmp_path).to_plain()
    (path,) = tmp_path.iterdir()
    for damaged in (b"", b"{", b"[]", b'{"tokenizer": "byte_pairs"}', path.read_bytes()[:-20]):
        path.write_bytes(damaged)
        assert build_tokenizer(recipe, text, tmp_path).to_plain() == first
    monkeypatch.setattr(BytePairs, "_learn", None)
    assert build_tokenizer(recipe, text, tmp_path).to_plain() == first
    assert build_tokenizer(Bytes(), text, tmp_path / "unused").vocab_size == 256
    assert not (tmp_path / "unused").exists()


def test_a_tokenizer_that_changes_the_text_is_refused(tmp_path):
    described = json.loads(build_tokenizer(BytePairs(vocab_size=260), [part("ab")], tmp_path).to_plain()["json"])
    described["normalizer"] = {"type": "NFKC"}
    with pytest.raises(ValueError, match=r"stand for 2 bytes, not 3, of 'ﬁ'"):
        encode([part("ﬁ")], BytePairTokenizer(json.dumps(described)), tmp_path)


def test_a_pickled_stream_is_a_path_and_not_its_content(tmp_path):
    stream = encode([Part(embedded("prose"))], ByteTokenizer(), tmp_path)
    pickled = pickle.dumps(stream)
    assert len(pickled) < 5000
    assert pickle.loads(pickled).array[:100].tolist() == stream.array[:100].tolist()


def test_the_folder_is_the_argument_then_the_variable_then_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_NORMS_CACHE", "/of/variable")
    assert str(cache_folder("/given")) == "/given"
    assert str(cache_folder(None)) == "/of/variable"
    monkeypatch.delenv("LIGHTNING_NORMS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "lightning_norms"


def test_a_folder_that_cannot_be_written_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write the cache folder .*set data.cache_dir or LIGHTNING_NORMS_CACHE"):
        encode([part("ab")], ByteTokenizer(), tmp_path / "file" / "below")
