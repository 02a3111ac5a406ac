"""Toy ranks that end with their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import Toys


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    toys = Toys(tmp_path)
    yield toys
    toys.end()
