"""Every promise of ``tierfs/SEMANTICS.md`` is quoted, word for word, by at least one test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import tierfs

TESTS = Path(__file__).parents[1]
PROMISE = re.compile(r"^- \[(S-[A-Z]+-\d+)\] (.+?)\s*$", re.MULTILINE)


def promises() -> dict[str, str]:
    text = Path(tierfs.__file__).with_name("SEMANTICS.md").read_text("utf-8")
    found = PROMISE.findall(text)
    assert len({identifier for identifier, _ in found}) == len(found), "an identifier is used twice"
    return dict(found)


def quotes() -> dict[str, set[str]]:
    """What the ``semantics`` markers say, read from the sources, so that it does not depend on a selection."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if name == "semantics" and len(node.args) == 2:
                    identifier, sentence = (ast.literal_eval(argument) for argument in node.args)
                    found[identifier].add(sentence)
    return found


PROMISES = promises()
QUOTES = quotes()


@pytest.mark.parametrize("identifier", PROMISES)
def test_promise_is_quoted(identifier: str) -> None:
    assert QUOTES.get(identifier) == {PROMISES[identifier]}


def test_nothing_else_is_quoted() -> None:
    assert set(QUOTES) <= set(PROMISES)
