"""The tables of docs/operations.md that come from code are those of the code."""

import re
from pathlib import Path

import pytest

from tfglm.supervisor import codes, facts
from tfglm.supervisor.cluster import Cluster, Docker, Limits, Member, Node, Ports, Rail, RailAddress

TEXT = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("exit codes", codes.table()),
        ("files of a node", facts.table(Cluster, Member, RailAddress, Ports, Docker, Limits, Node, Rail)),
    ],
)
def test_a_table_is_up_to_date(name: str, table: str) -> None:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", TEXT, re.DOTALL)
    assert found is not None
    assert found.group(1) == table
