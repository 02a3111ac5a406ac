"""config.json of a block drafter, in both published forms, as frozen facts.

Speculators form (DSpark, DFlash2): nested `transformer_layer_config` of a Qwen3 decoder. DFlash2's own form: a flat
Qwen3 config with `dflash_config`. What would need another forward pass is refused with its name and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfglm.checkpoint.jsonfile import read_object
from tfglm.errors import ConfigError

MARKOV_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class BlockConfig:
    """A few Qwen3 decoder layers that read the target's residual streams and fill a block of masks."""

    kind: str
    """ "dspark" or "dflash2"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    window: int
    """Committed rows that a block attends to."""
    window_by_query: bool
    """Whether the window counts back from each slot, instead of from the block's first."""
    causal: bool
    """Whether a slot sees the later slots of its block."""
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    """Target layers whose entering streams are read, ascending."""
    from_anchor: bool
    """Whether slot 0 already predicts the token after the pending one; else slot 1 does."""
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_taps: int = 0
    conv_group: int = 1

    @property
    def drafts(self) -> int:
        """Tokens of a block's draft."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @classmethod
    def from_file(cls, path: Path) -> BlockConfig:
        """The config in `path` (config.json itself). Raises ConfigError."""
        return cls.from_dict(read_object(path, ConfigError), str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> BlockConfig:
        """Raises ConfigError naming `source`, field, value and what is supported."""
        if "dflash_config" in raw:
            return _flat(raw, source)
        kind = raw.get("speculators_model_type")
        if kind not in ("dspark", "dflash2"):
            raise ConfigError(f"{source}: speculators_model_type is {kind!r}; supported: 'dspark', 'dflash2'")
        return _speculators(kind, raw, source)


class _Reader:
    """Typed reads that name the file and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def refuse(self, name: str, supported: str) -> ConfigError:
        return ConfigError(f"{self.source}: {name} is {self.raw.get(name)!r}; supported: {supported}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name, default)
        if type(value) is not int or not 0 < value < 1 << 24:
            raise self.refuse(name, "a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self.refuse(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def only(self, name: str, supported: Any) -> None:
        if self.raw.get(name, supported) != supported:
            raise self.refuse(name, repr(supported))

    def layers(self, name: str, shift: int) -> tuple[int, ...]:
        value = self.raw.get(name)
        numbers = value if isinstance(value, list) else []
        if not all(type(n) is int and n >= 0 for n in numbers) or not numbers or numbers != sorted(set(numbers)):
            raise self.refuse(name, "ascending layer numbers")
        return tuple(n + shift for n in numbers)

    def inner(self, name: str) -> _Reader:
        value = self.raw.get(name)
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return _Reader(value, f"{self.source}: {name}")


def _speculators(kind: str, raw: Mapping[str, Any], source: str) -> BlockConfig:
    top = _Reader(raw, source)
    qwen = top.inner("transformer_layer_config")
    decoder = _decoder(qwen)
    if top.integer("draft_vocab_size") != decoder["vocab_size"]:
        raise top.refuse("draft_vocab_size", f"the target's whole vocabulary, {decoder['vocab_size']}")
    top.only("norm_before_residual", False)
    if raw.get("target_hidden_size") not in (None, decoder["hidden_size"]):
        raise top.refuse("target_hidden_size", f"the drafter's own width, {decoder['hidden_size']}")
    fields: dict[str, Any] = {}
    if kind == "dspark":
        if raw.get("markov_rank", 256) != 0:
            fields["markov_rank"] = top.integer("markov_rank", 256)
        fields["markov_type"] = raw.get("markov_head_type", "vanilla")
        if fields["markov_type"] not in MARKOV_TYPES:
            raise top.refuse("markov_head_type", ", ".join(MARKOV_TYPES))
        fields["confidence"] = top.flag("enable_confidence_head", True)
        fields["confidence_with_markov"] = top.flag("confidence_head_with_markov", True) and "markov_rank" in fields
    else:
        fields |= _dflash2(top)
    return BlockConfig(
        kind=kind,
        **decoder,
        window_by_query=False,
        causal=not top.flag("sliding_window_non_causal", kind == "dflash2"),
        block_size=top.integer("block_size", 8),
        mask_token_id=_mask(top, decoder["vocab_size"]),
        layers=top.layers("aux_hidden_state_layer_ids", 0),
        from_anchor=top.flag("sample_from_anchor", kind == "dspark"),
        **fields,
    )


def _flat(raw: Mapping[str, Any], source: str) -> BlockConfig:
    """DFlash2's own form, whose target_layer_ids name the layers that a stream leaves."""
    qwen = _Reader(raw, source)
    inner, decoder = qwen.inner("dflash_config"), _decoder(qwen)
    return BlockConfig(
        kind="dflash2",
        **decoder,
        window_by_query=True,
        causal=qwen.flag("is_causal", False),
        block_size=inner.integer("block_size", 8),
        mask_token_id=_mask(inner, decoder["vocab_size"]),
        layers=inner.layers("target_layer_ids", 1),
        from_anchor=False,
        **_dflash2(inner),
    )


def _dflash2(reader: _Reader) -> dict[str, Any]:
    return {
        "selector_rank": reader.integer("selector_rank", 256),
        "selector_top_k": reader.integer("selector_top_k", 16),
        "conv_taps": reader.integer("conv_kernel_size", 2),
        "conv_group": reader.integer("conv_group_size", 16),
    }


def _decoder(qwen: _Reader) -> dict[str, Any]:
    """The Qwen3 part: sliding layers throughout, no biases, plain rotary angles."""
    count = qwen.integer("num_hidden_layers")
    qwen.only("layer_types", ["sliding_attention"] * count)
    qwen.only("attention_bias", False)
    qwen.only("hidden_act", "silu")
    rope = qwen.raw.get("rope_parameters") or {}
    theta = _Reader(rope if "rope_theta" in rope else qwen.raw, f"{qwen.source}: rope_parameters")
    _Reader(rope, f"{qwen.source}: rope_parameters").only("rope_type", "default")
    hidden, heads = qwen.integer("hidden_size"), qwen.integer("num_attention_heads")
    return {
        "vocab_size": qwen.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": qwen.integer("intermediate_size"),
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": qwen.integer("num_key_value_heads", heads),
        "head_dim": qwen.integer("head_dim", max(1, hidden // heads)),
        "rms_norm_eps": qwen.number("rms_norm_eps", 1e-6),
        "rope_theta": theta.number("rope_theta", 10000.0),
        "window": qwen.integer("sliding_window"),
    }


def _mask(reader: _Reader, vocab_size: int) -> int:
    value = reader.raw.get("mask_token_id")
    if type(value) is not int or not 0 <= value < vocab_size:
        raise reader.refuse("mask_token_id", f"0 to {vocab_size - 1}")
    return value
