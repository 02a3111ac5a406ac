"""The playbooks, on three fake machines: a plan changes nothing, a second run changes nothing, refusals name things."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machines import HUB, FakeMachines, needs_ansible, recap, task

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))

pytestmark = needs_ansible


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "E_CONFIG: tfglm_model_revision is empty; it takes the 40 digits of a commit of Mia-AiLab/GLM-5.3-EXL3"),
        ({}, "E_CONFIG: tfglm_drafter_revision is empty; it takes the 40 digits of a commit of RedHatAI/GLM-5.3"),
        ({}, "or set tfglm_checkpoint to a folder that is on rank 0 already"),
        ({"tfglm_model_revision": "main"}, "E_CONFIG: tfglm_model_revision is main; it takes the 40 digits"),
        ({"tfglm_model_id": ""}, "E_CONFIG: tfglm_model_id and tfglm_checkpoint are both empty"),
    ],
)
def test_the_example_asks_for_its_revisions_before_any_machine_is_reached(given: dict[str, str], said: str) -> None:
    """The example inventory as it is, whose machines are nowhere."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(ROOT / "inventory.example.ini")]
    done = subprocess.run(
        [*command, "site.yml", *(f"-e{name}={value}" for name, value in given.items())],
        cwd=ROOT / "playbooks",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in " ".join(done.stdout.split())
    assert "UNREACHABLE" not in done.stdout
    assert "Read the machine" not in done.stdout


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


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
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
