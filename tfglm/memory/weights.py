"""Bytes of weights a rank holds: every tensor, cut as the layout cuts it, in the format it is held in.

| held as | bytes |
|---|---|
| EXL3 | bits / 8 a weight; float16 scales of inputs and outputs |
| q4, q6, q8 | bits / 8 a weight, and 4 a group of 64 columns of a row; rows in pieces of 16 |
| fp8 | 1 a weight, and 4 a row; rows in pieces of 16 |
| bf16 | 2 a weight |
| vectors | 4 a value |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfglm.checkpoint.names import TensorSpec, layer_prefix
from tfglm.layout import Layout, Placement, Share
from tfglm.memory.flash import FlashInventory
from tfglm.memory.inventory import EXPERT, Alike, Inventory

_GROUP, _ROWS = 64, 16
_DENSE = {
    *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "eh_proj"),
    *("q_proj", "k_proj", "v_proj"),
}
"""Linears that are held in the dense format. The rest of an attention layer stays bfloat16: the indexer's choices are
made of near ties, and kv_b is multiplied head by head."""


@dataclass(frozen=True)
class WeightBytes:
    """experts: routed. dense: the rest of the trunk. vocabulary: embedding and head. mtp: the MTP layer, experts and
    all. largest: the largest tensor of the checkpoint, as a rank reads it."""

    experts: int
    dense: int
    vocabulary: int
    mtp: int
    largest: int


def layout_of(inventory: Inventory, ranks: int) -> Layout:
    """The cut of a model over ranks. Raises ConfigError for a number of ranks out of range."""
    return Layout.of(inventory.config, ranks)


def weight_bytes(inventory: Inventory | FlashInventory, layout: Layout, *, dense: str, head: str) -> list[WeightBytes]:
    """What each rank holds with linears outside the experts in the format `dense` and lm_head in `head`."""
    alike = inventory.alike(layout.ranks if layout.placement is Placement.BY_EXPERT else 1)
    return [_rank_bytes(inventory, layout, rank, alike, dense, head) for rank in range(layout.ranks)]


def _rank_bytes(
    inventory: Inventory | FlashInventory, layout: Layout, rank: int, alike: Alike, dense: str, head: str
) -> WeightBytes:
    mtp = layer_prefix(inventory.config.num_hidden_layers) + "."
    sums = dict.fromkeys(("experts", "dense", "vocabulary", "mtp"), 0)
    largest = 0
    for (tensor, spec, bits), count in alike.items():
        held, read = _tensor_bytes(layout, rank, tensor, spec, bits, dense, head)
        if bits is None and ".mlp.experts." in tensor:
            held = _padded_bytes(layout, rank, tensor, spec, inventory.config.n_routed_experts)
        part = "mtp" if tensor.startswith(mtp) else _part(tensor)
        sums[part] += count * held
        largest = max(largest, read)
    if isinstance(inventory, Inventory) and inventory.shared_scales:
        _once_a_layer(inventory, sums)
    return WeightBytes(**sums, largest=largest)


def _part(tensor: str) -> str:
    if ".mlp.experts." in tensor:
        return "experts"
    return "vocabulary" if tensor in ("model.embed_tokens.weight", "lm_head.weight") else "dense"


def _tensor_bytes(
    layout: Layout, rank: int, tensor: str, spec: TensorSpec, bits: float | None, dense: str, head: str
) -> tuple[int, int]:
    """Bytes held of a tensor, and bytes read of it. bits: of a weight stored as EXL3."""
    if len(spec.shape) == 1:
        return 4 * spec.shape[0], 2 * spec.shape[0]
    linear = tensor.removesuffix(".weight")
    rows, columns = (part.stop - part.start for part in Share(layout, rank).part(linear, spec.shape))
    if not rows or not columns:
        return 0, 0
    if bits is not None:
        packed = math.ceil(rows * columns * bits / 8) + 2 * (rows + columns)
        return packed, packed
    last = linear.rpartition(".")[2]
    held_as = head if last == "lm_head" else dense if last in _DENSE and ".mlp.experts." not in linear else "bf16"
    return matrix_bytes(rows, columns, held_as), 2 * rows * columns


def _padded_bytes(layout: Layout, rank: int, tensor: str, spec: TensorSpec, experts: int) -> int:
    """Of one expert's matrix in bfloat16. Those of a layer lie in one tensor, each as large as the largest of them."""
    share, linear = Share(layout, rank), tensor.removesuffix(".weight")
    kept = (share.part(EXPERT.sub(f".experts.{n}.", linear), spec.shape) for n in range(min(experts, layout.ranks)))
    return max(2 * (rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in kept)


def matrix_bytes(rows: int, columns: int, held_as: str) -> int:
    """A matrix [rows, columns] in a format of settings.DENSE_FORMATS; bf16 if its columns are no multiple of 64."""
    if held_as == "bf16" or columns % _GROUP:
        return 2 * rows * columns
    padded = -(-rows // _ROWS) * _ROWS
    if held_as == "fp8":
        return padded * columns + 4 * padded
    return padded * columns * int(held_as[1:]) // 8 + 4 * padded * columns // _GROUP


def _once_a_layer(inventory: Inventory, sums: dict[str, int]) -> None:
    """Leave one copy of the input scales of a layer's gates and ups."""
    config = inventory.config
    spare = 2 * config.hidden_size * (2 * config.n_routed_experts - 1)
    sums["experts"] -= spare * config.mlp_layer_types.count("sparse")
    sums["mtp"] -= spare * config.num_nextn_predict_layers
