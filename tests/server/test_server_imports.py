"""The HTTP side starts without torch: every one of its modules, and the terminal client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tfglm.server


def test_no_module_of_the_server_loads_torch():
    folder = Path(tfglm.server.__file__).parent
    modules = sorted(f"tfglm.server.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__")
    assert len(modules) > 20
    code = f"import sys, {', '.join(modules)}, tfglm.cli.chat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
