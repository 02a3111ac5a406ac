"""Identity by content: of the sources, of the archive made of them, of images."""

import hashlib
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tfglm.hosts.content import content_hash, image_identity, pack, source_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "tfglm/__pycache__").mkdir(parents=True)
    (root / "tfglm/a.py").write_text("a = 1\n")
    (root / "tfglm/run").write_text("#!/bin/sh\n")
    (root / "tfglm/run").chmod(0o755)
    (root / "tfglm/__pycache__/a.cpython-311.pyc").write_bytes(b"x")
    (root / "pyproject.toml").write_text("[project]\n")
    return root


def test_compiled_files_are_no_sources(tree: Path) -> None:
    assert source_files(tree) == ["pyproject.toml", "tfglm/a.py", "tfglm/run"]


def test_the_hash_follows_content_name_mode_and_what_belongs_to_it(tree: Path, tmp_path: Path) -> None:
    files = source_files(tree)
    first = content_hash(tree, files)
    other = shutil.copytree(tree, tmp_path / "other")
    assert content_hash(other, source_files(other)) == first
    assert content_hash(tree, files, "FROM x") != first
    (tree / "tfglm/run").chmod(0o644)
    assert content_hash(tree, files) != first
    (tree / "tfglm/run").chmod(0o755)
    (tree / "tfglm/a.py").write_text("a = 2\n")
    assert content_hash(tree, files) != first


def test_an_archive_has_the_same_bytes_on_another_day(tree: Path, tmp_path: Path) -> None:
    files = source_files(tree)
    pack(tree, files, tmp_path / "1.tar.gz")
    time.sleep(1.1)
    for name in files:
        (tree / name).touch()
    pack(tree, files, tmp_path / "2.tar.gz")
    hashes = {hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("1.tar.gz", "2.tar.gz")}
    assert len(hashes) == 1
    with tarfile.open(tmp_path / "1.tar.gz") as tar:
        assert [(entry.name, entry.mode) for entry in tar] == [
            ("pyproject.toml", 0o644),
            ("tfglm/a.py", 0o644),
            ("tfglm/run", 0o755),
        ]


def test_what_is_installed_from_the_archive_runs_without_anything_else(tmp_path: Path) -> None:
    """The supervisor's machine has a plain Python: no torch, no rich."""
    files = source_files(ROOT)
    pack(ROOT, files, tmp_path / "tfglm.tar.gz")
    with tarfile.open(tmp_path / "tfglm.tar.gz") as tar:
        tar.extractall(tmp_path / "src", filter="data")
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'rich', 'aiohttp', 'pydantic', 'jinja2']))"
    )
    code = f"{blocked}; sys.path.insert(0, {str(tmp_path / 'src')!r}); sys.argv[1:] = ['rank', 'check', '--rank', '0',"
    code += f" '--config', {str(tmp_path)!r}]; from tfglm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(["python3", "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 64, done.stderr
    assert "cluster.json" in done.stderr


def test_an_image_is_its_layers_and_configuration_not_its_id() -> None:
    image = {
        "Id": "sha256:1",
        "RootFS": {"Layers": ["sha256:a", "sha256:b"]},
        "Config": {"Env": ["A=1"], "Entrypoint": ["tfglm"], "Cmd": None, "WorkingDir": "/"},
    }
    same = image | {"Id": "sha256:2", "RepoTags": ["x"]}
    assert image_identity(image) == image_identity(same)
    assert image_identity(image) != image_identity(image | {"RootFS": {"Layers": ["sha256:a"]}})
    assert image_identity(image) != image_identity(image | {"Config": {"Env": ["A=2"]}})


def apply(patches: Path, target: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "roles/image/files/apply-series.sh"
    return subprocess.run([script, patches, target], capture_output=True, text=True, timeout=20)


@pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")
def test_patches_apply_in_order_and_a_reject_stops(tmp_path: Path) -> None:
    target, patches = tmp_path / "target", tmp_path / "patches"
    target.mkdir()
    patches.mkdir()
    (target / "f.txt").write_text("one\n")
    (patches / "b.patch").write_text("--- a/f.txt\n+++ b/f.txt\n@@ -1 +1 @@\n-one\n+two\n")
    (patches / "a.patch").write_text("--- a/f.txt\n+++ b/f.txt\n@@ -1 +1 @@\n-two\n+three\n")
    (patches / "series").write_text("# why\n\nb.patch\na.patch\n")
    done = apply(patches, target)
    assert done.returncode == 0, done.stderr
    assert (target / "f.txt").read_text() == "three\n"
    again = apply(patches, target)
    assert again.returncode == 1
    assert "E_CONFIG: b.patch of" in again.stderr


def test_the_series_names_every_patch_and_no_other(tmp_path: Path) -> None:
    lines = (ROOT / "patches/series").read_text().splitlines()
    named = [line for line in lines if line.strip() and not line.startswith("#")]
    assert sorted(named) == sorted(path.name for path in (ROOT / "patches").glob("*.patch"))
    done = apply(ROOT / "patches", tmp_path)
    assert done.returncode == 0 or named, done.stderr
