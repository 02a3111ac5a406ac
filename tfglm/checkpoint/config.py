"""config.json and generation_config.json of a `glm_moe_dsa` checkpoint, as frozen facts.

Field names are those of the files (transformers' GlmMoeDsaConfig). A field the file leaves out takes transformers'
default; a field this program cannot honour is refused with its name, its value and what is supported. `head_dim` is not
read: in GLM-5.3 it says 192, which is neither the rotary width (64) nor the query width (256).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

from tfglm.checkpoint.jsonfile import read_object, shown
from tfglm.errors import CheckpointError, ConfigError

MODEL_TYPE = "glm_moe_dsa"
INDEXER_LAYER_NORM_EPS = 1e-6
"""LayerNorm of the indexer's keys: fixed in every implementation, not a field of config.json."""

_MAX_LAYERS = 1024
_MAX_WIDTH = 1 << 24
"""Bound on every width and count; also the largest position float32 holds exactly, which the rotary angles need."""

IndexerType = Literal["full", "shared"]
MlpType = Literal["dense", "sparse"]


def require_folder(folder: Path) -> None:
    """Raise CheckpointError where nothing at all is a checkpoint."""
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise CheckpointError(f"{folder} {what}; a checkpoint is a folder with config.json and safetensors files")


@dataclass(frozen=True)
class ModelConfig:
    """The facts of one model. Widths in elements; layer counts are of the trunk, without the MTP layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float
    """Of q_a_layernorm and kv_a_layernorm. Equal to rms_norm_eps; transformers 5.23 alone uses 1e-6 there."""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[IndexerType, ...]
    """One a trunk layer; a shared layer reuses the selection of the nearest full layer below."""
    mlp_layer_types: tuple[MlpType, ...]
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    """0 or 1: whether the checkpoint holds an MTP layer, as layer number `num_hidden_layers`."""
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: Mapping[str, Any] | None
    """The raw quantization_config, None for a plain BF16 checkpoint."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.qk_head_dim**-0.5)

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """The config in `path` (config.json itself). Raises ConfigError."""
        return cls.from_dict(read_object(path, ConfigError), source=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """The config in the object `raw`. Raises ConfigError naming `source`, field, value and what is supported."""
        fields = _Fields(raw, source)
        _refuse_other_models(fields)
        layers = fields.integer("num_hidden_layers", 78, high=_MAX_LAYERS)
        rms_norm_eps = fields.number("rms_norm_eps", 1e-5, low=0, high=1)
        config = cls(
            vocab_size=fields.integer("vocab_size", 154880),
            hidden_size=fields.integer("hidden_size", 6144),
            num_hidden_layers=layers,
            intermediate_size=fields.integer("intermediate_size", 12288),
            moe_intermediate_size=fields.integer("moe_intermediate_size", 2048),
            num_attention_heads=fields.integer("num_attention_heads", 64),
            q_lora_rank=fields.integer("q_lora_rank", 2048),
            kv_lora_rank=fields.integer("kv_lora_rank", 512),
            qk_nope_head_dim=fields.integer("qk_nope_head_dim", 192),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim", 64),
            v_head_dim=fields.integer("v_head_dim", 256),
            rope_theta=_rope_theta(fields),
            max_position_embeddings=fields.integer("max_position_embeddings", 202752),
            rms_norm_eps=rms_norm_eps,
            latent_norm_eps=rms_norm_eps,
            index_n_heads=fields.integer("index_n_heads", 32),
            index_head_dim=fields.integer("index_head_dim", 128),
            index_topk=fields.integer("index_topk", 2048),
            indexer_types=_indexer_types(fields, layers),
            mlp_layer_types=_mlp_layer_types(fields, layers),
            n_routed_experts=fields.integer("n_routed_experts", 256),
            num_experts_per_tok=fields.integer("num_experts_per_tok", 8),
            n_shared_experts=fields.integer("n_shared_experts", 1),
            n_group=fields.only("n_group", 1, default=1),
            topk_group=fields.only("topk_group", 1, default=1),
            norm_topk_prob=fields.boolean("norm_topk_prob", True),
            routed_scaling_factor=fields.number("routed_scaling_factor", 2.5, low=0, high=1e6),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=1),
            eos_token_ids=fields.token_ids("eos_token_id"),
            pad_token_id=None if fields.missing("pad_token_id") else fields.integer("pad_token_id", 0, low=0),
            quantization=fields.mapping("quantization_config"),
        )
        _refuse_inconsistent(config, fields)
        return config


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling of a request that names none: generation_config.json, else the values published for GLM-5."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a reply besides those of config.json."""

    @classmethod
    def from_file(cls, path: Path) -> GenerationDefaults:
        """The defaults in `path`; the published ones if there is no such file. Raises ConfigError for a broken one."""
        if not path.exists():
            return cls()
        fields = _Fields(read_object(path, ConfigError), str(path))
        return cls(
            temperature=fields.number("temperature", 1.0, low=0, high=100),
            top_p=fields.number("top_p", 0.95, low=0, high=1),
            top_k=fields.integer("top_k", 0, low=0),
            min_p=fields.number("min_p", 0.0, low=0, high=1),
            repetition_penalty=fields.number("repetition_penalty", 1.0, low=0.001, high=100),
            eos_token_ids=() if fields.missing("eos_token_id") else fields.token_ids("eos_token_id"),
        )


class _Fields:
    """Typed reads out of a JSON object. A null counts as left out, as in transformers."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def missing(self, name: str) -> bool:
        return self.raw.get(name) is None

    def refuse(self, name: str, supported: str) -> ConfigError:
        value = f"is {shown(self.raw[name])}" if name in self.raw else "is not given"
        return ConfigError(f"{self.source}: {name} {value}; supported: {supported}")

    def integer(self, name: str, default: int, *, low: int = 1, high: int = _MAX_WIDTH) -> int:
        if self.missing(name):
            return default
        value = self.raw[name]
        if not _is_int(value) or not low <= value <= high:
            raise self.refuse(name, f"an integer, {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """A float in low..high."""
        if self.missing(name):
            return default
        value = self.raw[name]
        if not _is_number(value) or not low <= value <= high:
            raise self.refuse(name, f"a number, {low} to {high}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        if self.missing(name):
            return default
        value = self.raw[name]
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def only(self, name: str, supported: Any, *, default: Any = None) -> Any:
        """The one supported value; with no default the field must be given."""
        value = default if self.missing(name) else self.raw[name]
        if type(value) is not type(supported) or value != supported:
            raise self.refuse(name, f"{supported!r} only")
        return supported

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        if self.missing(name):
            return None
        value = self.raw[name]
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids, at least one."""
        value = self.raw.get(name)
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(_is_int(i) and 0 <= i < _MAX_WIDTH for i in ids):
            raise self.refuse(name, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_other_models(fields: _Fields) -> None:
    """What would need another forward pass than the one this program has."""
    if fields.raw.get("model_type") != MODEL_TYPE:
        raise fields.refuse("model_type", f"{MODEL_TYPE!r} (GLM-5.3)")
    dtype = "dtype" if "dtype" in fields.raw else "torch_dtype"  # the older name of the same field
    fields.only(dtype, "bfloat16", default="bfloat16")
    fields.only("hidden_act", "silu", default="silu")
    fields.only("attention_bias", False, default=False)
    fields.only("mlp_bias", False, default=False)
    fields.only("tie_word_embeddings", False, default=False)
    fields.only("scoring_func", "sigmoid", default="sigmoid")
    fields.only("topk_method", "noaux_tc", default="noaux_tc")
    fields.only("moe_layer_freq", 1, default=1)
    fields.only("moe_router_dtype", "float32", default="float32")
    # Code of this family once rotated halves instead of pairs under otherwise equal configs: silence is no answer.
    fields.only("rope_interleave", True)
    fields.only("indexer_rope_interleave", True)


def _rope_theta(fields: _Fields) -> float:
    if not fields.missing("rope_scaling"):
        raise fields.refuse("rope_scaling", "null (plain rotary embedding under rope_parameters)")
    parameters = fields.mapping("rope_parameters")
    if parameters is None:
        raise fields.refuse("rope_parameters", '{"rope_theta": number, "rope_type": "default"}')
    rope = _Fields(parameters, f"{fields.source}: rope_parameters")
    rope.only("rope_type", "default", default="default")
    rope.only("partial_rotary_factor", 1.0, default=1.0)
    if rope.missing("rope_theta"):
        raise rope.refuse("rope_theta", "a number above 1")
    return rope.number("rope_theta", 0.0, low=1, high=1e12)


def _indexer_types(fields: _Fields, layers: int) -> tuple[IndexerType, ...]:
    """Which layers run the indexer: the list if given, else the pattern, else the frequency rule."""
    if not fields.missing("indexer_types"):
        name, types = "indexer_types", fields.raw["indexer_types"]
    elif not fields.missing("index_topk_pattern"):
        name, pattern = "index_topk_pattern", fields.raw["index_topk_pattern"]
        words = {"F": "full", "S": "shared"}
        types = [words.get(letter) for letter in pattern] if isinstance(pattern, str) else pattern
    else:
        freq = fields.integer("index_topk_freq", 1, high=_MAX_LAYERS)
        offset = fields.integer("index_skip_topk_offset", 2, low=0, high=_MAX_LAYERS)
        name = "index_skip_topk_offset"
        types = ["full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers)]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in ("full", "shared") for kind in types)
        or types[0] != "full"
    ):
        raise fields.refuse(name, f"'full' or 'shared' for each of {layers} layers, the first 'full'")
    return cast(tuple[IndexerType, ...], tuple(types))


def _mlp_layer_types(fields: _Fields, layers: int) -> tuple[MlpType, ...]:
    if fields.missing("mlp_layer_types"):
        dense = min(fields.integer("first_k_dense_replace", 3, low=0), layers)
        types: Any = ["dense"] * dense + ["sparse"] * (layers - dense)
    else:
        types = fields.raw["mlp_layer_types"]
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise fields.refuse("mlp_layer_types", f"'dense' or 'sparse' for each of {layers} layers")
    return cast(tuple[MlpType, ...], tuple(types))


def _refuse_inconsistent(config: ModelConfig, fields: _Fields) -> None:
    """Fields that are fine alone and impossible together."""
    fields.only("num_key_value_heads", config.num_attention_heads, default=config.num_attention_heads)
    fields.only("qk_head_dim", config.qk_head_dim, default=config.qk_head_dim)
    if config.qk_rope_head_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "an even number (rotary pairs)")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise fields.refuse("index_head_dim", f"at least qk_rope_head_dim ({config.qk_rope_head_dim})")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise fields.refuse("num_experts_per_tok", f"at most n_routed_experts ({config.n_routed_experts})")
    if config.rms_norm_eps == 0:
        raise fields.refuse("rms_norm_eps", "a number above 0")
    if max(config.eos_token_ids) >= config.vocab_size:
        raise fields.refuse("eos_token_id", f"ids below vocab_size ({config.vocab_size})")
    if config.pad_token_id is not None and config.pad_token_id >= config.vocab_size:
        raise fields.refuse("pad_token_id", f"an id below vocab_size ({config.vocab_size})")
