"""A user's mistake in one short message: the key, the value given, what is allowed.

The parser's own messages wrap what matters in a page about types (``Does not validate against any of the Union
subtypes ...``). :func:`explain` keeps the part that a reader can act on.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping

NOISE = re.compile(
    r"^\s*(- )?(Does not validate against any of the Union|Subtypes:|Errors:|Expected a <class 'NoneType'>"
    r"|Given value|Problem with given class_path|Parser key|Expected a path but|Expected a dot import path"
    r"|Not a valid subclass of|Subclass types expect one of|a class path \(str\)|a dict with|a dict without)"
)
TOP = ["model", "data", "trainer", "seed_everything", "ckpt_path", "config"]
TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


def explain(message: str, choices: Mapping[str, type]) -> str:
    r"""The short form of a parser's message.

    Args:
        message: what jsonargparse said.
        choices: the base class that a key's value must be a subclass of, by the key's last word; its known subclasses
            are what is allowed.

    Example:
        >>> explain("Parser key \"trainer.max_steps\":\n  Expected a <class 'int'>. Got value: x", {})
        "trainer.max_steps is 'x', but it must be a whole number."
    """
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    for pattern, answer in (
        (r"Group '(?P<group>[^']*)' does not accept option '(?P<key>[^']+)'", _unknown_key),
        (r"does not accept option '(?P<key>[^']+)'", _unknown_key),
        (r"Option '(?P<key>[^']+)' is not accepted", _unknown_key),
        (r"[Uu]nrecognized arguments: -*(?P<key>[\w.+-]+)", _unknown_key),
        (r"Expected a dot import path string: (\S+)", _unknown_class),
        (r"Expected a <class '(\w+)'>\. Got value: ([^\n]*)", _wrong_type),
    ):
        if found := re.search(pattern, message):
            return answer(key, found, choices)
    kept = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip() and not NOISE.match(line)]
    text = "\n".join(dict.fromkeys(kept)) or message.splitlines()[0]
    return f"{key}: {text}" if key and key not in text else text


def subclasses(base: type) -> list[str]:
    """Names of the classes that can be given by one word where ``base`` is asked for."""
    found: list[str] = []
    children: list[type] = base.__subclasses__()
    for child in children:
        if not inspect.isabstract(child) and not child.__name__.startswith("_"):
            found.append(child.__name__)
        found.extend(subclasses(child))
    return sorted(set(found))


def _unknown_key(key: str, found: re.Match[str], choices: Mapping[str, type]) -> str:
    parts = [key, found.groupdict().get("group"), found["key"]]
    *parents, word = ".".join(part for part in parts if part).split(".")
    if parents and parents[0] not in TOP:  # the wrong key holds others
        parents, word = [], parents[0]
    allowed = _arguments(choices[parents[-1]]) if parents and parents[-1] in choices else TOP
    near = difflib.get_close_matches(word, allowed, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "See --help for all keys."
    return f"there is no key {'.'.join([*parents, word])!r}. {hint}"


def _unknown_class(key: str, found: re.Match[str], choices: Mapping[str, type]) -> str:
    base = next((choices[word] for word in reversed(key.split(".")) if word in choices), None)
    known = subclasses(base) if base is not None else []
    near = difflib.get_close_matches(found[1], known, n=3)
    names = near if near and len(known) > 10 else known  # there are some thirty callbacks
    listed = f" {'one of ' if len(names) > 1 else ''}{', '.join(names)} or" if names else ""
    return f"{key} is {found[1]!r}, but it must be{listed} the path of an importable class (package.module.Class)."


def _wrong_type(key: str, found: re.Match[str], _: Mapping[str, type]) -> str:
    return f"{key} is {found[2]!r}, but it must be {TYPES.get(found[1], found[1])}."


def _arguments(base: type) -> list[str]:
    """Every argument of a class and of its subclasses."""
    words: set[str] = set()
    pending = [base]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        words.update(inspect.signature(cls).parameters)
    return sorted(words)
