import logging
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_norms.data.corpus import embedded
from lightning_norms.data.text import TextDataModule
from lightning_norms.data.tokens import BytePairs


@pytest.fixture
def make(tmp_path):
    def make(train=None, **arguments):
        if isinstance(train, bytes):
            (tmp_path / "train.txt").write_bytes(train)
            train = str(tmp_path / "train.txt")
        return TextDataModule(train, **{"cache_dir": str(tmp_path / "cache"), **arguments})

    return make


def scored_bytes(data, batches):
    return sum(int(data.token_bytes[b["targets"].clamp(min=0)][b["targets"] >= 0].sum()) for b in batches)


@pytest.mark.parametrize("tokens", [None, BytePairs(vocab_size=300)])
def test_scored_bytes_of_the_embedded_sets_and_training_bytes_are_the_corpus(make, tokens):
    data = make(**({"tokens": tokens} if tokens else {}), val_batch_size=64)
    data.setup("fit")
    assert data.val_names == ["code", "prose"]
    stream = data._source.train_stream
    trained = sum(count * size for count, size in zip(stream.counts, data.token_bytes.tolist(), strict=True))
    scored = [scored_bytes(data, batches) for batches in data.val_dataloader()]
    assert trained + sum(scored) == embedded("code").size + embedded("prose").size
    assert 0.07 < scored[0] / embedded("code").size < 0.13


def test_attributes_need_no_setup_and_are_exact(make):
    data = make(b"aab\xc3\xa9", val_fraction=0.0, context_length=2, batch_size=1)
    assert data.vocab_size == 256
    assert not Path(data.cache_dir).exists()  # nothing was read for it
    assert data.train_tokens == 6  # boundary, a, a, b, two bytes
    expected = -(2 / 6 * math.log(2 / 6) + 4 * (1 / 6) * math.log(1 / 6))
    assert data.unigram_entropy == pytest.approx(expected, rel=1e-12)
    assert (data.token_bytes.dtype, data.token_bytes.shape) == (torch.int64, (256,))
    assert data.token_bytes[0] == 0
    assert data.val_names == data.val_dataloader() == []
    assert data.tokenizer.decode(data.tokenizer.encode("é")) == "é"


def test_the_vocabulary_of_pairs_is_there_before_setup(make):
    assert make(b"ab ab ab ab\n" * 30, tokens=BytePairs(vocab_size=259)).vocab_size == 259


def test_training_windows_are_the_text_one_token_apart(make):
    data = make(bytes(range(1, 128)), val_fraction=0.0, context_length=4, batch_size=3)
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == 31 // 3
    seen = []
    for batch in loader:
        assert batch["inputs"].shape == batch["targets"].shape == (3, 4)
        assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64
        assert torch.equal(batch["targets"], batch["inputs"] + 1)
        seen += batch["targets"].flatten().tolist()
    assert len(set(seen)) == len(seen) == 120


def test_a_boundary_is_a_training_target_and_no_validation_target(make, tmp_path):
    for name, text in (("1.txt", "abc"), ("2.txt", "de")):
        (tmp_path / name).write_text(text)
    files = str(tmp_path / "?.txt")
    data = make(files, val={"same": files}, context_length=6, batch_size=1)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch["inputs"].tolist() == [[0, 97, 98, 99, 0, 100]]
    assert batch["targets"].tolist() == [[97, 98, 99, 0, 100, 101]]
    (batch,) = data.val_dataloader()[0]
    assert batch["inputs"].tolist() == [[0, 97, 98, 99, 0, 100]]
    assert batch["targets"].tolist() == [[97, 98, 99, -100, 100, 101]]


def test_a_validation_set_shorter_than_a_window_is_one_short_window(make, tmp_path):
    (tmp_path / "val.txt").write_bytes(b"hi\r\n")
    data = make(b"x" * 100, val={"tiny": str(tmp_path / "val.txt")}, context_length=8, batch_size=2)
    data.setup("fit")
    (batch,) = data.val_dataloader()[0]
    assert batch["inputs"].tolist() == [[0, 104, 105, 13, 10, 0, 0, 0]]
    assert batch["targets"].tolist() == [[104, 105, 13, 10, -100, -100, -100, -100]]


def test_validation_batches_come_in_the_same_shuffled_order_whatever_the_seed(make, tmp_path):
    (tmp_path / "val.txt").write_bytes(bytes(range(1, 128)) * 8)

    def first(seed):
        data = make(b"x" * 100, val={"v": str(tmp_path / "val.txt")}, seed=seed, context_length=8, val_batch_size=4)
        data.setup("validate")
        return next(iter(data.val_dataloader()[0]))["inputs"]

    assert torch.equal(first(0), first(1))
    assert not torch.equal(first(0)[1], first(0)[0] + 8)


def test_a_small_user_file_is_split_in_two(make):
    text = "".join(f"{number} {'word ' * (number % 7)}\n" for number in range(300)).encode()
    data = make(text, context_length=4, batch_size=1)
    data.setup("fit")
    assert data.val_names == ["val"]
    stream = data._source.train_stream
    assert sum(stream.counts[1:]) + scored_bytes(data, data.val_dataloader()[0]) == len(text)


def test_text_length_against_context_length(make):
    # The stream is the boundary and 8 bytes: one window of 8 inputs and 8 targets.
    data = make(b"abcdefgh", val_fraction=0.0, context_length=8, batch_size=1)
    data.setup("fit")
    assert [batch["targets"].tolist() for batch in data.train_dataloader()] == [[list(b"abcdefgh")]]
    with pytest.raises(ValueError, match=r"training text of train \(.*train.txt\): 9 tokens make 0 .*context_length=9"):
        make(b"abcdefgh", val_fraction=0.0, context_length=9, batch_size=1).setup("fit")
    with pytest.raises(ValueError, match=r"train.txt.*1 window\(s\) of context_length=8, fewer than batch_size=2"):
        make(b"abcdefgh", val_fraction=0.0, context_length=8, batch_size=2).setup("fit")


def test_a_text_that_cannot_be_split_says_what_to_do(make):
    with pytest.raises(ValueError, match=r"validation set 'val' of train \(.*train.txt\) is empty: give"):
        make(b"one line", context_length=2, batch_size=1, val_fraction=0.001).setup("fit")


ODD = {
    "only newlines": b"\n" * 5000,
    "byte order mark": b"\xef\xbb\xbf" + b"line\n" * 1000,
    "carriage returns": b"line\r\n" * 1000,
    "one line of 5 MB": b"a" * 5_000_000,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_work(make, name):
    data = make(ODD[name], context_length=16, batch_size=2, val_batch_size=4096)
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["inputs"].shape == (2, 16)
    kept = sum(data._source.train_stream.counts[1:]) + scored_bytes(data, data.val_dataloader()[0])
    assert kept == len(ODD[name]) - 3 * (name == "byte order mark")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"train.txt is empty \(0 bytes\)"),
        (b"\xef\xbb\xbf", r"train.txt\): 0 tokens make 0 windows"),
        (b"it\x92s", r"train.txt: byte 0x92 at position 2 is not UTF-8"),
        (b"a\0b", r"train.txt: NUL byte at position 1"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), r"train.txt: byte 0x89 at position 0 is not UTF-8"),
    ],
)
def test_files_that_are_no_text_are_one_sentence(make, text, message):
    with pytest.raises(ValueError, match=message):
        make(text, val_fraction=0.0).setup("fit")


NAN = float("nan")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"context_length": value}, "TextDataModule: context_length must be .* at least 1, got")
            for value in (0, -1, None, NAN, 2.5)
        ),
        *(
            ({"batch_size": value}, "TextDataModule: batch_size must be .* at least 1, got")
            for value in (0, -8, None, True, "8")
        ),
        *(
            ({"val_batch_size": value}, "TextDataModule: val_batch_size must be .* at least 1, got")
            for value in (0, -8, NAN)
        ),
        *(({"num_workers": value}, "TextDataModule: num_workers must be .* at least 0, got") for value in (-1, None)),
        *(({"seed": value}, "TextDataModule: seed must be .* at least 0, got") for value in (-1, True, 0.5)),
        *(
            ({"val_fraction": value}, "TextDataModule: val_fraction must be a number of at least 0 and below 1, got")
            for value in (1, -0.1, NAN, None)
        ),
        ({"tokens": "Bytes"}, "TextDataModule: tokens must be one of BytePairs, Bytes, got 'Bytes'"),
        ({"train": []}, r"TextDataModule: train must be a file, folder or glob, or a list of them, got \[\]"),
        ({"train": ""}, "TextDataModule: train must be a file, folder or glob, or a list of them, got ''"),
        ({"val": "a.txt"}, "TextDataModule: val must be a mapping {name: files, ...}.* got 'a.txt'"),
        (
            {"val": {"books": []}},
            r"TextDataModule: val\['books'\] must be a file, folder or glob, or a list of them, got \[\]",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_given_and_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**arguments)


def test_the_fingerprint_is_of_the_text(make):
    assert make(b"abc").fingerprint == make(b"abc", tokens=BytePairs(), seed=3).fingerprint
    assert make(b"abc").fingerprint != make(b"abd").fingerprint
    assert len(make(b"abc").fingerprint) == 64


def test_the_log_says_once_what_the_text_is(make, caplog):
    data = make(b"x" * 100, val_fraction=0.0, batch_size=1)
    with caplog.at_level(logging.INFO, logger="lightning_norms"):
        data.setup("fit")
        data.setup("validate")
    assert [record.name for record in caplog.records] == ["lightning_norms.data.text"]
    assert f"text {data.fingerprint[:12]}: tokens {{'train': 101}}, vocabulary of 256" in caplog.text


def test_validating_on_training_files_is_said(make, caplog, tmp_path):
    make(b"x" * 100, val={"same": str(tmp_path / "train.txt")}, batch_size=1).setup("fit")
    assert "validation set 'same' holds 1 file(s) that are trained on" in caplog.text


def test_loaders_draw_no_global_random_numbers(make):
    data = make(b"x" * 600, val_fraction=0.0)
    data.setup("fit")
    before = torch.get_rng_state()
    list(data.train_dataloader())
    assert torch.equal(before, torch.get_rng_state())


def test_a_data_module_can_be_pickled_after_setup(make):
    data = make(b"ab cd\n" * 300, tokens=BytePairs(vocab_size=260))
    data.setup("fit")
    again = pickle.loads(pickle.dumps(data))
    first, second = next(iter(data.train_dataloader())), next(iter(again.train_dataloader()))
    assert torch.equal(first["inputs"], second["inputs"])


LOCALE_RUN = """
import sys
from lightning_norms.data.text import TextDataModule
from lightning_norms.data.tokens import BytePairs, Bytes

for tokens in (Bytes(), BytePairs(vocab_size=260)):
    data = TextDataModule(sys.argv[1], cache_dir=sys.argv[2], batch_size=1, context_length=8, tokens=tokens)
    data.setup()
    next(iter(data.train_dataloader()))
    assert data.tokenizer.decode(data.tokenizer.encode("\\u00e9")) == "\\u00e9"
data = TextDataModule(cache_dir=sys.argv[2])
data.setup()
print(sys.flags.utf8_mode, data.train_tokens)
"""


def test_text_is_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "train.txt").write_bytes("é😀\n".encode() * 200)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOCALE_RUN, str(tmp_path / "train.txt"), str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    utf8_mode, train_tokens = map(int, done.stdout.split())
    assert utf8_mode == 0
    assert train_tokens > 4_000_000
