"""Variables: what the example documents, the roles take and the roles' defaults say is one list."""

import ast
import configparser
import dataclasses
import re
from pathlib import Path

import pytest

from tfglm.layout import MAX_RANKS
from tfglm.settings import Settings
from tfglm.supervisor import provision
from tfglm.supervisor.codes import Exit

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; make provision-check brings it")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = (ROOT / "inventory.example.ini").read_text()
DEFAULTS = yaml.safe_load((ROOT / "roles/tfglm/defaults/main.yml").read_text())
DERIVED = yaml.safe_load((ROOT / "roles/tfglm/vars/main.yml").read_text())
SPECS = yaml.safe_load((ROOT / "roles/tfglm/meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
DOCUMENTED = set(re.findall(r"^#?(tfglm_\w+)=", EXAMPLE, re.MULTILINE))


def test_every_variable_has_a_default_and_is_specified() -> None:
    assert set(DEFAULTS) == set(SPECS)


def test_variables_and_settings_do_not_share_a_name() -> None:
    settings = {f"tfglm_{f.name}" for f in dataclasses.fields(Settings)} - {"tfglm_rank"}
    assert not settings & (set(SPECS) | set(DERIVED))


def test_the_example_documents_every_variable_and_no_other() -> None:
    assert set(SPECS) | set(provision.setting_variables()) == DOCUMENTED


def test_the_example_has_the_settings_of_today() -> None:
    assert provision.inventory_lines() in EXAMPLE, (
        "replace the end of inventory.example.ini by the output of "
        "`python -c 'from tfglm.supervisor import provision; print(provision.inventory_lines())'`"
    )


def test_defaults_in_the_example_are_the_defaults() -> None:
    shown = dict(re.findall(r"^#(tfglm_\w+)=(.*)$", EXAMPLE, re.MULTILINE))
    for name, value in DEFAULTS.items():
        if name not in shown or "{{" in str(value) or name == "tfglm_links":
            continue
        words = {"true": True, "false": False, "": ""}
        if shown[name] in words:
            found = words[shown[name]]
        else:
            try:
                found = ast.literal_eval(shown[name])
            except (ValueError, SyntaxError):
                found = shown[name]
        assert found == value, name


def test_every_variable_that_a_role_uses_is_known() -> None:
    known = set(SPECS) | set(DERIVED) | {f"tfglm_{f.name}" for f in dataclasses.fields(Settings)}
    known |= {"tfglm_checked", "tfglm_names", "tfglm_x"}
    files = [*ROOT.glob("roles/**/*.yml"), *ROOT.glob("roles/**/*.j2"), *ROOT.glob("playbooks/*.yml")]
    modules = {path.stem for path in (ROOT / "playbooks/library").glob("*.py")}
    filters = set(re.findall(r'"(tfglm_\w+)":', (ROOT / "playbooks/filter_plugins/tfglm.py").read_text()))
    assert len(files) > 40
    for path in files:
        used = set(re.findall(r"\btfglm_\w+", path.read_text())) - modules - filters
        assert used <= known, f"{path}: {used - known}"


def test_every_variable_is_used() -> None:
    kinds = ("tasks/*.yml", "vars/*.yml", "templates/*", "handlers/*.yml")
    texts = [path.read_text() for kind in kinds for path in ROOT.glob(f"roles/*/{kind}")]
    texts += [path.read_text() for path in ROOT.glob("playbooks/*.yml")]
    texts.append(re.sub(r"^tfglm_\w+:", "", (ROOT / "roles/tfglm/defaults/main.yml").read_text(), flags=re.MULTILINE))
    unused = [name for name in SPECS if not any(re.search(rf"\b{name}\b", text) for text in texts)]
    assert unused == []


def test_the_unit_gives_up_on_the_exits_that_end_the_same_again() -> None:
    unit = (ROOT / "roles/engine/templates/tfglm@.service.j2").read_text()
    given = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert given is not None
    assert {int(word) for word in given[1].split()} == {int(code) for code in Exit if code and not code.again}


def test_all_machines_of_the_largest_cluster_act_at_once() -> None:
    """Ports hear each other only while all listen, and ranks meet only while all try."""
    config = configparser.ConfigParser()
    config.read(ROOT / "playbooks/ansible.cfg")
    assert config.getint("defaults", "forks") >= MAX_RANKS
    assert "ServerAliveInterval=" in config.get("ssh_connection", "ssh_args")


def test_shared_code_is_shared_not_copied() -> None:
    utils = ROOT / "playbooks/module_utils"
    assert {path.name: path.resolve() for path in utils.iterdir()} == {
        "tfglm_hosts": ROOT / "tfglm/hosts",
        "tfglm_memory.py": ROOT / "tfglm/memory/info.py",
    }
    carried = ["fabric", "cables", "facts", "snapshot", "content", "serving"]
    for path in [*(ROOT / f"tfglm/hosts/{name}.py" for name in carried), ROOT / "tfglm/memory/info.py"]:
        assert not re.search(r"^\s*(from|import) tfglm", path.read_text(), re.MULTILINE), path
