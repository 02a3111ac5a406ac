"""The playbooks, on three fake machines: a plan changes nothing, a second run changes nothing, refusals name things."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_machines import FakeMachines, NoNamespacesError

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
VENV = Path(os.environ.get("TFGLM_TEST_VENV", ROOT / ".venv"))

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        "TFGLM_TEST_VENV" not in os.environ or importlib.util.find_spec("ansible") is None,
        reason="plays take minutes and need Ansible: make provision-check runs them",
    ),
]


def test_there_is_a_playbook_for_everything() -> None:
    wanted = {"site", "start", "stop", "restart", "status", "plan", "logs", "download", "verify"}
    assert wanted <= set(PLAYBOOKS)


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_syntax_with_the_example_inventory(playbook: str) -> None:
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(ROOT / "inventory.example.ini")]
    done = subprocess.run(
        [*command, "--syntax-check", f"{playbook}.yml"],
        cwd=ROOT / "playbooks",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMachines]:
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


def recap(output: str) -> dict[str, tuple[int, int]]:
    """(changed, failed) by machine."""
    found = re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=(\d+)", output, re.MULTILINE)
    return {name: (int(changed), int(failed)) for name, changed, failed in found}


def task(output: str, name: str) -> str:
    """What one task said."""
    return output.partition(f"{name}] *")[2].partition("\nTASK")[0]


def test_a_misspelt_variable_is_refused_before_anything(machines: FakeMachines) -> None:
    done = machines.play("plan", tfglm_contxt=5)
    assert done.returncode != 0
    assert "E_CONFIG: tfglm_contxt is in the inventory, but there is no such variable" in done.stdout
    assert "did you mean tfglm_context?" in " ".join(done.stdout.split())


def test_the_wrong_processor_is_refused_before_anything(machines: FakeMachines) -> None:
    done = machines.play("site", tfglm_arch="s390x")
    assert "E_WORKER: spark1: its processor is" in done.stdout
    assert machines.written() == []


def test_part_of_a_cluster_is_refused(machines: FakeMachines) -> None:
    done = machines.play("site", "--limit", "spark0,spark1")
    assert "E_CONFIG: this play runs on spark0, spark1" in " ".join(done.stdout.split())
    assert machines.written() == []


def test_a_plan_with_ports_that_are_off_names_what_is_missing(machines: FakeMachines) -> None:
    done = machines.play("plan")
    assert "E_FABRIC: spark0 and spark1 share no cable" in " ".join(done.stdout.split())
    assert machines.written() == []


def test_site_prepares_everything_once(machines: FakeMachines) -> None:
    first = machines.play("site")
    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-2000:]
    assert all(changed > 8 and failed == 0 for changed, failed in recap(first.stdout).values())
    assert len({machines.run(name, "cat /etc/tfglm/cluster.json").stdout for name in machines.names}) == 1
    for i, name in enumerate(machines.names):
        assert machines.document(name, "rank.json")["rank"] == i
        assert machines.document(name, "rank.json")["mount"] == ("" if i == 0 else "/srv/models")
    second = machines.play("site")
    assert second.returncode == 0, second.stdout[-4000:]
    assert recap(second.stdout) == dict.fromkeys(machines.names, (0, 0)), re.findall(
        r"TASK.*\n(?:changed.*)", second.stdout
    )


def test_check_mode_of_a_prepared_cluster_is_clean(machines: FakeMachines) -> None:
    done = machines.play("site", "--check", "--diff")
    assert done.returncode == 0, done.stdout[-4000:]
    assert recap(done.stdout) == dict.fromkeys(machines.names, (0, 0))


def test_a_plan_shows_what_a_changed_setting_would_do_and_does_not_do_it(machines: FakeMachines) -> None:
    before = machines.run("spark1", "cat /etc/tfglm/cluster.json").stdout
    done = machines.play("plan", tfglm_context=512)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r'^-\s+"context": "256",?\n\+\s+"context": "512",?$', done.stdout, re.MULTILINE)
    assert "rank 2 on spark2: weights" in " ".join(task(done.stdout, "Show the plan").split())
    command = " ".join(task(done.stdout, "Show the command of the rank").split())
    assert "/opt/tfglm/bin/tfglm engine /srv/models/tiny --rank 2 --ranks 3 --leader 10.77.9.10:29561" in command
    assert machines.run("spark1", "cat /etc/tfglm/cluster.json").stdout == before


def test_the_service_command_runs_on_every_machine(machines: FakeMachines) -> None:
    for i, name in enumerate(machines.names):
        done = machines.run(name, f"/usr/local/bin/tfglm rank command --rank {i}")
        assert done.returncode == 0, done.stderr
        assert f"--rank {i} --ranks 3" in done.stdout


def test_units_hold_what_systemd_knows(machines: FakeMachines) -> None:
    units = machines.root("spark1") / "etc/systemd/system"
    automount = (units / "srv-models.automount").read_text()
    assert "Where=/srv/models" in automount
    mount = (units / "srv-models.mount").read_text()
    assert "What=10.122.0.1:/srv/models" in mount
    service = (units / "tfglm@.service").read_text()
    assert "Wants=network-online.target srv-models.automount\n" in service
    assert "Requires" not in service, "a mount that fails at boot must not take the rank with it"
    if shutil.which("systemd-analyze"):
        # The programs of the units are not on this machine.
        text = service.replace("/opt/tfglm/bin/tfglm", "/bin/true").replace("tfglm@%i", "tfglm@1")
        checked = machines.folder / "units"
        for file, content in (("tfglm@1.service", text), *((p.name, p.read_text()) for p in units.glob("srv-*"))):
            checked.mkdir(exist_ok=True)
            (checked / file).write_text(content)
        shutil.copy(units / "tfglm.target", checked)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--recursive-errors=no", *sorted(map(str, checked.iterdir()))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        said = [line for line in done.stderr.splitlines() if str(checked) in line]
        assert said == []


def test_the_export_is_read_only_for_the_cables_alone(machines: FakeMachines) -> None:
    root = machines.root("spark0")
    lines = (root / "etc/exports.d/tfglm.exports").read_text().splitlines()
    export = [line for line in lines if line and not line.startswith("#")]
    options = "(ro,no_subtree_check,all_squash,anonuid=0,anongid=0)"
    assert export == [f'"/srv/models" 10.122.0.0/24{options} 10.122.2.0/24{options}']
    assert not (machines.root("spark1") / "etc/exports.d/tfglm.exports").exists()


def test_a_worker_whose_checkpoint_differs_is_refused(machines: FakeMachines) -> None:
    shard = next((machines.root("spark2") / "srv/models/tiny").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    try:
        done = machines.play("site")
    finally:
        shard.write_bytes(whole)
    said = " ".join(done.stdout.split())
    assert f"E_CHECKPOINT: spark2 does not see /srv/models/tiny as spark0 has it: {shard.name} has" in said


def test_a_wrong_cable_is_named(machines: FakeMachines) -> None:
    links = [{"a": "spark1", "a_port": "p1", "b": "spark2", "b_port": "p0"}]
    done = machines.play("plan", tfglm_links=links)
    assert "E_FABRIC: spark1 p1 should reach spark2 but reaches spark0" in " ".join(done.stdout.split())


HUB = """
import http.server, json
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        gated = "/org/gated" in self.path
        known = {"secret": 401, "away": 500}
        code = next((code for name, code in known.items() if f"/org/{name}" in self.path), 200)
        code = 403 if gated and "/resolve/" in self.path else code
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"siblings": [{"rfilename": "x", "size": 2**60, "blobId": "0"}]}).encode())
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", 8099), Hub).serve_forever()
"""


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("org/open", "main", "E_CONFIG: the revision of org/open is main; it takes the 40 digits of a commit"),
        ("org/gated", "a" * 40, "E_CHECKPOINT: the token's account may not read org/gated (403)"),
        (
            "org/secret",
            "a" * 40,
            "E_CHECKPOINT: the Hub does not accept a request without a token for org/secret (401)",
        ),
        ("org/open", "a" * 40, "org/open needs 1073741824.0 more, and 1 stay free"),
        ("org/away", "a" * 40, "E_CHECKPOINT: http://127.0.0.1:8099 answers with 500"),
    ],
)
def test_what_cannot_be_downloaded_is_explained(machines: FakeMachines, model: str, revision: str, said: str) -> None:
    hub = subprocess.Popen(["ip", "netns", "exec", machines.netns[0], sys.executable, "-c", HUB])
    try:
        done = machines.play(
            "download",
            tfglm_checkpoint="",
            tfglm_model_id=model,
            tfglm_model_revision=revision,
            tfglm_hf_home="/srv/hf",
            tfglm_hf_endpoint="http://127.0.0.1:8099",
            tfglm_keep_free_gib=1,
        )
    finally:
        hub.kill()
        hub.wait()
    assert done.returncode != 0
    assert said in " ".join(done.stdout.split()), done.stdout[-3000:]


def test_start_does_not_wait_for_single_ranks_and_stop_stops_them(machines: FakeMachines) -> None:
    log = machines.root("spark2") / "var/lib/stub-systemd/log"
    log.write_text("")
    done = machines.play("start", tfglm_wait_s=1)
    assert "E_RANKS: http://127.0.0.1:18999/health did not answer within 1 s" in " ".join(done.stdout.split())
    done = machines.play("stop")
    assert done.returncode == 0, done.stdout[-3000:]
    said = [line.split() for line in log.read_text().splitlines()]
    starts = [i for i, words in enumerate(said) if "start" in words and "tfglm@2.service" in words]
    stops = [i for i, words in enumerate(said) if "stop" in words and "tfglm@2.service" in words]
    assert len(starts) == len(stops) == 1
    assert starts < stops
    assert "--no-block" in said[starts[0]]
