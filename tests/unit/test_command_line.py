"""What a slip on the command line is answered with: a line that names the thing and what would work."""

from pathlib import Path

import pytest

from tfglm.bundled import DRAFTER, MODEL
from tfglm.cli.main import main
from tfglm.cli.serve import with_drafter
from tfglm.settings import Settings


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--prot", "9"], "tfglm serve: error: it takes no --prot; did you mean --port? tfglm serve --help"),
        (["check", "exact", "--token=3", "URL", "--frobnicate"], "tfglm check exact: error: it takes no --frobnicate;"),
        (["plan", "one", "two"], "tfglm plan: error: it takes no two; tfglm plan --help lists all"),
    ],
)
def test_an_unknown_flag_is_answered_by_the_command_it_was_given_to(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "plan", "inspect"])
def test_a_path_that_is_no_checkpoint(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, what in ((tmp_path, "has no config.json"), (tmp_path / "none", "is not a folder")):
        assert main([command, str(path), *(["--port", "0"] if command == "serve" else [])]) == 1
        wanted = f"{path} {what}; a checkpoint is a folder with config.json and safetensors files"
        assert f"tfglm: E_CHECKPOINT: {wanted}" in capsys.readouterr().err


def test_the_tiny_model_has_its_drafter_however_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODEL.parent)
    for path in (MODEL, Path(MODEL.name)):
        for drafter, folder in (("auto", str(DRAFTER)), ("dspark", str(DRAFTER)), ("mtp", ""), ("none", "")):
            assert with_drafter(path, Settings(drafter=drafter)).drafter_path == folder
    assert with_drafter(MODEL, Settings(drafter_path="/mine")).drafter_path == "/mine"
    assert with_drafter(MODEL.parent, Settings()).drafter_path == ""


def test_a_drafter_that_is_none_is_named_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--drafter", "dspark", "--drafter-path", str(tmp_path)]) == 1
    assert f"E_CONFIG: --drafter-path: {tmp_path}/config.json does not exist" in capsys.readouterr().err


def test_a_plan_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 1
    assert "--preset full, --preset flash and --cluster" in capsys.readouterr().err
