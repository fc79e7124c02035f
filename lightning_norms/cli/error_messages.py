"""Short messages for mistakes in a configuration: the key, its value, and what is allowed.

The parser's own messages bury this in a page about types (``Does not validate against any of the Union subtypes ...``).
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
TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text",
    "list": "a list, such as [0, 1, 2]",
}  # fmt: skip


def explain(message: str, choices: Mapping[str, type]) -> str:
    r"""Shorten a parser's message to the part that a reader can act on.

    Args:
        message: The message of jsonargparse.
        choices: Last word of a key -> the class whose subclasses it accepts.

    Example:
        >>> explain("Parser key \"trainer.max_steps\":\n  Expected a <class 'int'>. Got value: x", {})
        "trainer.max_steps is 'x', but it must be a whole number."
    """
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    for pattern, answer in (
        (r"Group '(?P<group>[^']*)' does not accept option '(?P<key>[^']+)'", _unknown_key),
        (r"does not accept option '(?P<key>[^']+)'", _unknown_key),
        (r"Option '(?P<key>[^']+)' is not accepted", _unknown_key),
        (r"[Uu]nrecognized arguments: --?(?P<key>[\w.+-]+)", _unknown_key),
        (r"Expected a dot import path string: (\S+)", _unknown_class),
        (r"Expected a <class '(\w+)'>\. Got value: ([^\n]*)", _wrong_type),
        (
            r"Expected (?:a )?<class '(\w+)'>\s+- Expected (?:a )?<class 'NoneType'>\n.*\n\s*Given value: (.*)",
            _wrong_type,
        ),
    ):
        if match := re.search(pattern, message):
            return answer(key, match, choices)
    kept = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip() and not NOISE.match(line)]
    text = "\n".join(dict.fromkeys(kept)) or message.splitlines()[0]
    return f"{key}: {text}" if key and key not in text else text


def subclasses(base: type) -> list[str]:
    """Names of the classes that can be given by one word where ``base`` is expected."""
    classes = _descendants(base)
    return sorted({cls.__name__ for cls in classes if not inspect.isabstract(cls) and not cls.__name__.startswith("_")})


def _descendants(base: type) -> set[type]:
    children: list[type] = base.__subclasses__()
    return {*children, *(cls for child in children for cls in _descendants(child))}


def _unknown_key(key: str, match: re.Match[str], choices: Mapping[str, type]) -> str:
    parts = [key, match.groupdict().get("group"), match["key"]]
    *parents, word = ".".join(part for part in parts if part).split(".")
    if parents and parents[0] not in TOP:  # the wrong key holds others
        parents, word = [], parents[0]
    allowed = _arguments(choices[parents[-1]]) if parents and parents[-1] in choices else TOP
    near = difflib.get_close_matches(word, allowed, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "See --help for all keys."
    return f"there is no key {'.'.join([*parents, word])!r}. {hint}"


def _unknown_class(key: str, match: re.Match[str], choices: Mapping[str, type]) -> str:
    base = next((choices[word] for word in reversed(key.split(".")) if word in choices), None)
    allowed = subclasses(base) if base is not None else []
    near = difflib.get_close_matches(match[1], allowed, n=3)
    names = near if near and len(allowed) > 10 else allowed  # there are some thirty callbacks
    listed = f" {'one of ' if len(names) > 1 else ''}{', '.join(names)} or" if names else ""
    return f"{key} is {match[1]!r}, but it must be{listed} the path of an importable class (package.module.Class)."


def _wrong_type(key: str, match: re.Match[str], _: Mapping[str, type]) -> str:
    return f"{key} is {match[2]!r}, but it must be {TYPES.get(match[1], match[1])}."


def _arguments(base: type) -> list[str]:
    classes = {base, *_descendants(base)}
    return sorted({name for cls in classes for name in inspect.signature(cls).parameters})
