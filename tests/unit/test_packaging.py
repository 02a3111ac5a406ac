"""What a wheel must carry besides modules: files that are read at run time, found by no import."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_data_file_is_declared() -> None:
    declared = {
        file
        for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    present = {
        file for file in (ROOT / "tfglm").rglob("*") if file.is_file() and file.suffix not in ("", ".py", ".pyc")
    }
    assert present == declared
    assert {".jinja", ".json", ".cu", ".cuh"} <= {file.suffix for file in present}


def test_the_command_exists() -> None:
    module, function = PYPROJECT["project"]["scripts"]["tfglm"].split(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
