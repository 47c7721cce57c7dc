"""Every case has a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_case_from_1_to_32_is_tested() -> None:
    names = re.compile(r"^(?:async )?def test_c(\d\d)_", re.MULTILINE)
    found = {int(n) for path in TESTS.rglob("test_*.py") for n in names.findall(path.read_text("utf-8"))}
    assert set(range(1, 33)) <= found
