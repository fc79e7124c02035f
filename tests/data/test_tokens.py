import json
import pickle
import sys

import numpy as np
import pytest

from lightning_norms.data import tokenizing
from lightning_norms.data.corpus import embedded
from lightning_norms.data.splitting import Part
from lightning_norms.data.tokenizing import ByteTokenizer, from_plain
from lightning_norms.data.tokens import BytePairs, Bytes

TEXTS = [
    "",
    "def f(x):\n\treturn x  # é 😀 \r\n",
    "<|boundary|> spelt out",
    " leading and trailing ",
    "\u202eabc\ufeff\u0301 \x01\x7f",
    "日本語",
]


def prose():
    return (text for _, text in Part(embedded("prose")).pieces())


@pytest.fixture(scope="module")
def pairs():
    return BytePairs(vocab_size=400).build(prose)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_every_byte_is_counted(pairs, text):
    for tokenizer in (ByteTokenizer(), pairs):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert sum(tokenizer.token_bytes[token] for token in tokens) == len(text.encode())
        assert 0 not in tokens


@pytest.mark.parametrize("text", TEXTS)
def test_an_array_holds_what_the_list_does(pairs, text):
    for tokenizer, dtype in (
        (ByteTokenizer(), np.dtype("<u1")),
        (ByteTokenizer(), np.dtype("<u2")),
        (pairs, np.dtype("<u2")),
    ):
        array = tokenizer.encode_array(text, dtype)
        assert array.dtype == dtype
        assert array.tolist() == tokenizer.encode(text)


def test_bytes_have_256_tokens_and_the_boundary_no_bytes():
    tokenizer = Bytes().build(lambda: iter(()))
    assert (tokenizer.vocab_size, sum(tokenizer.token_bytes), tokenizer.token_bytes[0]) == (256, 255, 0)
    with pytest.raises(ValueError, match=r"NUL.*byte 3"):
        tokenizer.encode("é\n\0")
    with pytest.raises(ValueError, match=r"NUL.*byte 3"):
        tokenizer.encode_array("é\n\0", np.dtype("u1"))


def test_pairs_are_fewer_tokens_than_bytes_and_learnt_the_same_every_time(pairs):
    assert pairs.vocab_size == 400
    assert pairs.token_bytes[0] == 0
    assert max(pairs.token_bytes) > 1
    text = "The statement is executed when the function is called."
    assert len(pairs.encode(text)) < len(text) / 2
    assert BytePairs(vocab_size=400).build(prose).to_plain() == pairs.to_plain()


def test_a_boundary_decodes_to_nothing_and_broken_utf8_to_a_mark(pairs):
    for tokenizer in (ByteTokenizer(), pairs):
        assert tokenizer.decode([0, *tokenizer.encode("a"), 0, *tokenizer.encode("b")]) == "ab"
        assert tokenizer.decode(tokenizer.encode("é")[:1]) in ("\ufffd", "é")
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_a_plain_state_goes_through_json_and_pickle(pairs):
    for tokenizer in (ByteTokenizer(), pairs):
        state = json.loads(json.dumps(tokenizer.to_plain()))
        assert all(isinstance(value, str) for value in state.values())
        for again in (from_plain(state), pickle.loads(pickle.dumps(tokenizer))):
            assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
            assert again.token_bytes == tokenizer.token_bytes


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match=r"\['byte_pairs', 'bytes'\], but this one has 'words'"):
        from_plain({"tokenizer": "words"})


def test_pairs_can_be_read_from_a_file(pairs, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(pairs.to_plain()["json"], encoding="utf-8")
    read = BytePairs(path=str(path)).build(lambda: iter(()))
    assert read.encode(TEXTS[1]) == pairs.encode(TEXTS[1])
    assert read.vocab_size == 400


def test_a_file_without_a_boundary_at_token_0_is_refused(pairs, tmp_path):
    described = json.loads(pairs.to_plain()["json"])
    described["added_tokens"] = []
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json': token 0 must be a special token.*'<\|boundary\|>'"):
        BytePairs(path=str(path)).build(lambda: iter(()))
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json': this is not a tokenizer.json"):
        BytePairs(path=str(path)).build(lambda: iter(()))
    with pytest.raises(FileNotFoundError, match=r"no file '.*nowhere.json'"):
        BytePairs(path=str(tmp_path / "nowhere.json")).build(lambda: iter(()))


@pytest.mark.parametrize("size", [256, 0, -1, 2.5, None, True, float("nan")])
def test_a_vocabulary_too_small_for_bytes_is_refused(size):
    with pytest.raises(ValueError, match="vocab_size must be a whole number of at least 257, got"):
        BytePairs(vocab_size=size)


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-norms\[bpe\]'"):
        BytePairs().build(prose)
    assert tokenizing.ByteTokenizer().encode("a") == [97]
