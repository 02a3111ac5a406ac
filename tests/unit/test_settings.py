import dataclasses
from pathlib import Path

import pytest

from tfglm.errors import ConfigError
from tfglm.settings import Settings, env_name, help_text, table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_flags_win_over_environment_over_defaults() -> None:
    env = {"TFGLM_PORT": "9000", "TFGLM_PARALLEL": "2"}
    settings = Settings.from_sources({"port": 9001, "host": None}, env)
    assert (settings.port, settings.parallel, settings.host) == (9001, 2, "127.0.0.1")


def test_every_default_lies_in_its_own_range() -> None:
    defaults = dataclasses.asdict(Settings())
    assert Settings.from_sources(defaults, {}) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "80a"),
        ("port", "70000"),
        ("port", "-1"),
        ("parallel", "0"),
        ("device", "tpu"),
        ("kv", "fp3"),
        ("thinking", "maybe"),
        ("keepalive_s", "nan"),
        ("keepalive_s", "inf"),
        ("context", "1e6"),
        ("disk_keep_free_gib", "-0.5"),
    ],
)
def test_a_bad_value_names_setting_value_and_range(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_sources({}, {env_name(name): value})
    text = str(caught.value)
    assert env_name(name) in text
    assert repr(value) in text
    assert "takes" in text


@pytest.mark.parametrize(("word", "value"), [("1", True), ("off", False), ("True", True), ("no", False)])
def test_booleans_in_words(word: str, value: bool) -> None:
    assert Settings.from_sources({}, {"TFGLM_THINKING": word}).thinking is value


def test_the_readme_table_is_this_table() -> None:
    assert table() in README.read_text(), (
        "paste the output of `python -c 'from tfglm import settings; print(settings.table())'`"
    )


def test_help_shows_defaults_as_one_would_type_them() -> None:
    lines = {f.name: help_text(f) for f in dataclasses.fields(Settings)}
    assert lines["copy"].endswith("(0, 1; default 1; TFGLM_COPY)")
    assert lines["kv"].endswith("fp32; default bf16; TFGLM_KV)")
    assert lines["api_key"].endswith("(text; TFGLM_API_KEY)")


def test_a_misspelt_variable_is_refused_with_the_name_it_resembles() -> None:
    with pytest.raises(ConfigError, match=r"TFGLM_PROT .* did you mean TFGLM_PORT\?"):
        Settings.from_sources({}, {"TFGLM_PROT": "9000"})
