"""Configuration files before and behind the command, divided by commands or not."""

import re

import pytest

from lightning_norms.cli.config_files import arrange

COMMANDS = ("fit", "diagnose")
FILES = {
    "flat.yaml": "model: {class_path: M}\ntrainer: {max_steps: 3}\n",
    "more.yaml": "trainer: {max_steps: 4}\n",
    "fit.yaml": "fit: {model: {class_path: M}}\n",
    "both.yaml": "fit: {}\ndiagnose: {}\n",
    "beside.yaml": "fit: {}\ntrainer: {max_steps: 3}\n",
    "empty.yaml": "",
}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("words", "arranged"),
    [
        ("fit --config flat.yaml --a 1", None),
        ("--config fit.yaml fit", None),
        ("--config both.yaml diagnose", None),
        ("fit", None),
        ("--help", None),
        ("--config fit.yaml", None),
        ("fit --config empty.yaml", None),
        ("fit --a --config", None),  # the parser complains
        ("--config flat.yaml fit --a 1", "fit --config flat.yaml --a 1"),
        ("-c flat.yaml --config=more.yaml fit -c empty.yaml", "fit -c flat.yaml --config=more.yaml -c empty.yaml"),
        ("fit -c fit.yaml --config=both.yaml --a 1", "-c fit.yaml --config=both.yaml fit --a 1"),
        ("--config fit.yaml --config flat.yaml fit", "--config fit.yaml fit --config flat.yaml"),
        ("-c fit.yaml fit -c both.yaml -c flat.yaml", "-c fit.yaml -c both.yaml fit -c flat.yaml"),
    ],
)
def test_each_file_goes_to_the_side_where_the_parser_takes_it(words, arranged):
    assert arrange(words.split(), COMMANDS) == (arranged or words).split()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-c flat.yaml -c fit.yaml fit", "put flat.yaml after fit: it has no section 'fit'."),
        ("fit --a 1 -c fit.yaml", "put fit.yaml before fit: it has a section 'fit'."),
        ("fit -c flat.yaml -c fit.yaml", "put fit.yaml before fit: it has a section 'fit'."),
        (
            "-c fit.yaml diagnose",
            "fit.yaml has no section 'diagnose', only fit: rename it, or put its keys at the top.",
        ),
        ("fit -c beside.yaml", "beside.yaml has keys beside its section 'fit': move trainer into it."),
    ],
)
def test_what_would_change_the_order_is_one_sentence(words, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        arrange(words.split(), COMMANDS)
