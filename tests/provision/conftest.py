"""Three fake machines for all tests of plays, made once."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_machines import FakeMachines, NoNamespacesError

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("TFGLM_TEST_VENV", ROOT / ".venv"))


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMachines]:
    """With the tiny checkpoint on each, and nothing else."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("ping"):
        pytest.skip("fake machines need root, ip and ping")
    if not (VENV / "bin/python").exists():
        pytest.skip(f"{VENV} is not there: tfglm's own environment, which the machines use")
    try:
        with FakeMachines(tmp_path_factory.mktemp("machines"), VENV) as made:
            if made.run("spark0", "ls /etc").returncode:
                pytest.skip("overlays or namespaces cannot be mounted here")
            tiny = made.folder / "tiny"
            code = "from tfglm.cli.main import entry; entry()"
            command = [str(VENV / "bin/python"), "-c", code, "synth", str(tiny), "--preset", "tiny", "--seed", "0"]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
            for name in made.names:
                shutil.copytree(tiny, made.root(name) / "srv/models/tiny")
            yield made
    except NoNamespacesError as error:
        pytest.skip(f"fake machines cannot be wired here: {error}")


@pytest.fixture(scope="session")
def prepared(machines: FakeMachines) -> FakeMachines:
    """The machines after site.yml, with nothing started."""
    if not (machines.root("spark2") / "etc/tfglm/rank.json").exists():
        done = machines.play("site")
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return machines
