"""Which drafter settings and files come to, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.presets import preset_config
from tfglm.drafts.kind import cached_bytes_per_token, drafter_kind
from tfglm.errors import ConfigError
from tfglm.settings import Settings

WITH_MTP = ModelConfig.from_dict(preset_config("tiny", {}))
WITHOUT = dataclasses.replace(WITH_MTP, num_nextn_predict_layers=0)


def folder(path: Path, kind: str, **changes: Any) -> str:
    qwen = {
        "vocab_size": 1536, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 100,
    } | changes  # fmt: skip
    config = {
        "speculators_model_type": kind, "transformer_layer_config": qwen, "draft_vocab_size": qwen["vocab_size"],
        "mask_token_id": 5, "aux_hidden_state_layer_ids": [1, 3],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(bytes(1000))
    return str(path)


def test_without_a_folder_the_mtp_layer_drafts_if_there_is_one() -> None:
    assert drafter_kind(Settings(), WITH_MTP) == drafter_kind(Settings(drafter="mtp"), WITH_MTP) == "mtp"
    assert drafter_kind(Settings(), WITHOUT) == drafter_kind(Settings(drafter="none"), WITH_MTP) == "none"
    with pytest.raises(ConfigError, match="has no MTP layer"):
        drafter_kind(Settings(drafter="mtp"), WITHOUT)


def test_a_dspark_folder_is_taken_by_itself_a_dflash2_folder_only_by_name(tmp_path: Path) -> None:
    path = folder(tmp_path, "dspark")
    for drafter in ("auto", "dspark"):
        assert drafter_kind(Settings(drafter=drafter, drafter_path=path), WITH_MTP) == "dspark"
    path = folder(tmp_path, "dflash2")
    assert drafter_kind(Settings(drafter="dflash2", drafter_path=path), WITH_MTP) == "dflash2"
    with pytest.raises(ConfigError, match="say --drafter dflash2"):
        drafter_kind(Settings(drafter_path=path), WITH_MTP)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafter": "dspark"}, "needs --drafter-path"),
        ({"drafter": "dflash2"}, "needs --drafter-path"),
        ({"drafter": "mtp", "drafter_path": "x"}, "which --drafter mtp does not read"),
        ({"drafter": "dspark", "drafter_path": "nowhere"}, r"nowhere/config\.json does not exist"),
    ],
)
def test_what_is_asked_for_must_be_there(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_kind(Settings(**fields), WITH_MTP)


def test_a_folder_must_hold_that_kind_for_that_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a dflash2 drafter"):
        drafter_kind(Settings(drafter="dspark", drafter_path=folder(tmp_path, "dflash2")), WITH_MTP)
    for changes, words in (({"hidden_size": 256}, "hidden_size is 256"), ({"vocab_size": 99}, "vocab_size is 99")):
        with pytest.raises(ConfigError, match=words):
            drafter_kind(Settings(drafter="dspark", drafter_path=folder(tmp_path, "dspark", **changes)), WITH_MTP)


def test_what_a_drafter_caches_for_a_token() -> None:
    c = WITH_MTP
    row = c.kv_lora_rank + c.qk_rope_head_dim + c.index_head_dim
    assert cached_bytes_per_token("mtp", c, "bf16") == 2 * row and cached_bytes_per_token("none", c, "bf16") == 0
