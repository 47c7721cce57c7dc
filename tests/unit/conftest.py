"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.namespace import Namespace, open_namespace
from tierfs.namespace.refresh import Refresher


@pytest.fixture
def ns(tmp_path: Path) -> Iterator[Namespace]:
    """An empty namespace over a store in memory."""
    with open_namespace(tmp_path) as ns:
        yield ns


@pytest.fixture
def refresher(ns: Namespace) -> Refresher:
    return ns.refresher()
