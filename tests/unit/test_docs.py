"""What the documents name exists."""

import re
from pathlib import Path

from tfglm.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_command_and_no_other() -> None:
    assert set(re.findall(r"^\| `tfglm ([a-z]+)", README, re.MULTILINE)) == set(COMMANDS)


def test_the_readme_links_to_files_that_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links), links


def test_the_files_of_the_structure_are_there() -> None:
    text = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
    files = set(re.findall(r"\b((?:[a-z]+/)+[a-z0-9_]+\.py)\b", text))
    missing = [file for file in files if not ((ROOT / "tfglm" / file).exists() or (ROOT / file).exists())]
    assert len(files) > 20 and not missing, missing
