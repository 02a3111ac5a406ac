"""config.json and generation_config.json: what is read, what takes a default, what is refused and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from tfglm.checkpoint.config import GenerationDefaults, ModelConfig
from tfglm.checkpoint.presets import preset_config
from tfglm.errors import ConfigError


def real(**changes: Any) -> dict[str, Any]:
    """GLM-5.3's config.json, with changes."""
    return {**preset_config("full-layers", {"num_hidden_layers": 78, "n_routed_experts": 256}), **changes}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in real().items() if name not in names}


def test_glm53_facts() -> None:
    config = ModelConfig.from_dict(real())
    assert [i for i, kind in enumerate(config.indexer_types) if kind == "full"] == [0, 1, 2, *range(6, 75, 4)]
    assert config.indexer_types.count("shared") == 57
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert config.qk_head_dim == 256
    assert config.attention_scale == 1 / 16
    assert config.rope_theta == 8e6
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert config.pad_token_id == 154820
    assert config.latent_norm_eps == config.rms_norm_eps == 1e-5
    assert config.quantization is None


def test_left_out_fields_take_the_defaults_of_transformers() -> None:
    from transformers import GlmMoeDsaConfig

    needed = ("model_type", "rope_interleave", "indexer_rope_interleave", "rope_parameters", "eos_token_id")
    config = ModelConfig.from_dict({name: real()[name] for name in needed})
    reference = GlmMoeDsaConfig()
    names = (
        "vocab_size hidden_size num_hidden_layers intermediate_size moe_intermediate_size num_attention_heads "
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim max_position_embeddings rms_norm_eps "
        "index_n_heads index_head_dim index_topk n_routed_experts num_experts_per_tok n_shared_experts n_group "
        "topk_group norm_topk_prob routed_scaling_factor"
    )
    for name in names.split():
        assert getattr(config, name) == getattr(reference, name), name
    assert list(config.indexer_types) == reference.indexer_types
    assert list(config.mlp_layer_types) == reference.mlp_layer_types
    assert config.num_nextn_predict_layers == 0


@pytest.mark.parametrize(("freq", "offset", "layers"), [(1, 2, 9), (4, 3, 11), (4, 2, 10), (3, 1, 8), (2, 5, 7)])
def test_frequency_rule_agrees_with_transformers(freq: int, offset: int, layers: int) -> None:
    from transformers import GlmMoeDsaConfig

    fields = {"num_hidden_layers": layers, "index_topk_freq": freq, "index_skip_topk_offset": offset}
    raw = without("indexer_types", "mlp_layer_types") | fields
    reference = GlmMoeDsaConfig(**fields).indexer_types
    if reference[0] == "full":
        assert list(ModelConfig.from_dict(raw).indexer_types) == reference
    else:
        with pytest.raises(ConfigError, match="first 'full'"):
            ModelConfig.from_dict(raw)


def test_precedence_of_the_indexer_fields() -> None:
    raw = real(num_hidden_layers=4, mlp_layer_types=None, index_topk_pattern="FSSF")
    raw["indexer_types"] = ["full", "full", "shared", "shared"]
    assert ModelConfig.from_dict(raw).indexer_types == ("full", "full", "shared", "shared")
    raw["indexer_types"] = None
    assert ModelConfig.from_dict(raw).indexer_types == ("full", "shared", "shared", "full")


def test_null_is_a_field_left_out() -> None:
    assert ModelConfig.from_dict(real(routed_scaling_factor=None)).routed_scaling_factor == 2.5
    assert ModelConfig.from_dict(real(pad_token_id=None)).pad_token_id is None


def test_head_dim_is_ignored() -> None:
    assert ModelConfig.from_dict(real(head_dim=64)) == ModelConfig.from_dict(real())


def test_quantization_config_is_kept_raw() -> None:
    raw = {"quant_method": "exl3", "bits": 2.75}
    assert ModelConfig.from_dict(real(quantization_config=raw)).quantization == raw


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("model_type", "deepseek_v3", "glm_moe_dsa"),
        ("model_type", None, "glm_moe_dsa"),
        ("dtype", "float32", "bfloat16"),
        ("hidden_act", "gelu", "silu"),
        ("attention_bias", True, "False"),
        ("mlp_bias", True, "False"),
        ("tie_word_embeddings", True, "False"),
        ("scoring_func", "softmax", "sigmoid"),
        ("topk_method", "greedy", "noaux_tc"),
        ("moe_layer_freq", 2, "1 only"),
        ("moe_router_dtype", "bfloat16", "float32"),
        ("n_group", 2, "1 only"),
        ("topk_group", 2, "1 only"),
        ("rope_interleave", False, "True only"),
        ("indexer_rope_interleave", False, "True only"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "null"),
        ("rope_parameters", None, "rope_theta"),
        ("rope_parameters", "default", "an object"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}, "'default' only"),
        ("rope_parameters", {"rope_type": "default"}, "a number"),
        ("rope_parameters", {"rope_theta": "8e6"}, "a number"),
        ("indexer_types", ["full"] * 77, "78 layers"),
        ("indexer_types", ["shared"] + ["full"] * 77, "first 'full'"),
        ("indexer_types", ["full"] * 77 + ["half"], "78 layers"),
        ("indexer_types", "full", "78 layers"),
        ("mlp_layer_types", ["dense"] * 3, "78 layers"),
        ("mlp_layer_types", ["dense"] * 77 + ["moe"], "78 layers"),
        ("num_hidden_layers", 0, "1 to"),
        ("num_hidden_layers", 10**9, "1 to"),
        ("hidden_size", "6144", "an integer"),
        ("hidden_size", 6144.0, "an integer"),
        ("hidden_size", True, "an integer"),
        ("hidden_size", [6144], "an integer"),
        ("hidden_size", 10**4000, "an integer"),
        ("hidden_act", "x" * 100_000, "'silu' only"),
        ("vocab_size", -1, "1 to"),
        ("index_topk", 0, "1 to"),
        ("index_head_dim", 32, "at least qk_rope_head_dim"),
        ("qk_rope_head_dim", 63, "qk_head_dim"),
        ("qk_head_dim", 192, "256"),
        ("num_key_value_heads", 8, "64 only"),
        ("num_experts_per_tok", 257, "at most n_routed_experts"),
        ("n_shared_experts", 0, "1 to"),
        ("max_position_embeddings", 1 << 25, "1 to"),
        ("rms_norm_eps", "1e-5", "a number"),
        ("rms_norm_eps", 0, "above 0"),
        ("rms_norm_eps", float("nan"), "a number"),
        ("routed_scaling_factor", -1, "a number"),
        ("norm_topk_prob", 1, "true or false"),
        ("num_nextn_predict_layers", 2, "0 to 1"),
        ("eos_token_id", None, "token id"),
        ("eos_token_id", [], "token id"),
        ("eos_token_id", ["</s>"], "token id"),
        ("eos_token_id", [154880], "below vocab_size"),
        ("pad_token_id", 154880, "below vocab_size"),
        ("quantization_config", "exl3", "an object"),
    ],
)
def test_refusals_name_field_value_and_what_is_supported(field: str, value: object, supported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(real(**{field: value}), source="some/config.json")
    message = str(caught.value)
    assert message.startswith("E_CONFIG: some/config.json")
    assert supported in message
    if field == "rope_parameters" and isinstance(value, dict):
        assert "rope_parameters: rope_t" in message
    elif field != "qk_rope_head_dim":
        assert f"{field} is {repr(value)[:200]}" in message
    assert len(message) < 500


@pytest.mark.parametrize("field", ["rope_interleave", "indexer_rope_interleave", "model_type"])
def test_flags_that_must_be_given(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is not given"):
        ModelConfig.from_dict(without(field))


def test_odd_rope_width() -> None:
    with pytest.raises(ConfigError, match="qk_rope_head_dim is 63; supported: an even number"):
        ModelConfig.from_dict(without("qk_head_dim") | {"qk_rope_head_dim": 63})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n "a": 1,\n "b": }', "line 3"),
        (b"[1]", "a JSON array; an object is needed"),
        (b"null", "a JSON null"),
        (b"", "line 1"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' is given more than once"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON this program can hold"),
        (b'{"a": ' + b"[" * 100_000, "not JSON this program can hold"),
    ],
)
def test_broken_json_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig.from_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_file(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert GenerationDefaults.from_file(path) == GenerationDefaults()
    path.write_text(json.dumps({"temperature": 1.0, "top_p": 0.95, "eos_token_id": [5, 7, 5], "pad_token_id": 5}))
    assert GenerationDefaults.from_file(path) == GenerationDefaults(top_p=0.95, eos_token_ids=(5, 7))
    path.write_text(json.dumps({"temperature": 0, "top_k": 20, "eos_token_id": 3, "unknown": {}}))
    assert GenerationDefaults.from_file(path) == GenerationDefaults(temperature=0.0, top_k=20, eos_token_ids=(3,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "1"),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("eos_token_id", "x"),
    ],
)
def test_generation_defaults_refuse_nonsense(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError, match=f"{field} is {value!r}"):
        GenerationDefaults.from_file(path)
