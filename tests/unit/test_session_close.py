"""How long a process of several ranks waits for the others when it ends."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from tfglm.cli.session import Session


@pytest.mark.parametrize(("idle", "failed"), [(True, False), (False, True)])
def test_ranks_that_were_told_of_a_failure_are_not_waited_for_long(idle: bool, failed: bool) -> None:
    """Nor are those that have not joined yet, which nobody can tell."""
    engine, others = Mock(), Mock()
    engine.stop.return_value = idle
    Session(others, engine=engine).close(None)
    others.close.assert_called_once_with(failed=failed)
