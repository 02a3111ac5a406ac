"""The house's import rule: packages import downwards only, and the HTTP side never loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "tfglm"

# Lowest first. A package may import packages of a lower level, or itself.
LEVELS = [
    {"errors", "bundled", "__init__"},
    {"settings"},
    {"formats", "layout", "checkpoint", "hosts"},
    {"ops", "cache", "kernels"},
    {"models"},
    {"drafts"},
    {"engine", "ranks", "memory", "quantize"},
    {"server", "supervisor", "checks"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import hides its direction"
            module = node.module or ""
            names = [f"tfglm.{a.name}" for a in node.names] if module == "tfglm" else [module]
        else:
            continue
        units |= {name.split(".")[1] for name in names if name.startswith("tfglm.")}
    return units - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LEVEL, f"{unit} has no level yet: add it to LEVELS"
    for other in imported_units(path):
        assert other == unit or LEVEL[other] <= LEVEL[unit], (
            f"{path.name} ({unit}) imports {other}, which lies above it"
        )
        assert other != "cli" or unit == "cli"


def test_the_http_side_never_loads_torch() -> None:
    """The server, the terminal client, the checks and the parts of the engine that the server speaks with."""
    server = [f"tfglm.server.{path.stem}" for path in (ROOT / "server").glob("*.py") if path.stem != "__init__"]
    checks = [f"tfglm.checks.{path.stem}" for path in (ROOT / "checks").glob("*.py") if path.stem != "__init__"]
    engine = ["tfglm.engine.api", "tfglm.engine.tokenizer", "tfglm.engine.text"]
    code = f"import sys, {', '.join([*server, *checks, *engine])}, tfglm.cli.main; sys.exit('torch' in sys.modules)"
    assert len(server) > 20
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_models_never_import_cupy() -> None:
    for path in (ROOT / "models").rglob("*.py"):
        assert "cupy" not in path.read_text(), path


@pytest.mark.parametrize("unit", ["models", "ops", "cache", "drafts"])
def test_no_import_hides_in_a_function(unit: str) -> None:
    """There it would only break a circle of modules, which is to be cut where it is."""
    for path in (ROOT / unit).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                hidden = [inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Import | ast.ImportFrom)]
                assert not hidden, f"{path}, line {hidden}"
