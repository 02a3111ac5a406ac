"""What a slip on the command line is answered with: a line that names the thing and what would work."""

from pathlib import Path

import pytest

from tfglm.cli.main import main


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


def test_a_plan_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 1
    assert "--preset full, --preset flash and --cluster" in capsys.readouterr().err
