"""What prompts and windows take of a GPU beside weights and caches: the bytes of all tensors that live at the same time
at the peak of a chunk, from shapes alone. Torch-free.

Each phase of a forward pass (models/glm53.py, models/mtp.py) is the sum of what the phases before it left and what it
makes itself; the peak is the largest. A unit test lets the very forward pass run with its kernels left out, counts what
lives, and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.config import ModelConfig
from tfglm.drafts.kind import block_config, drafter_kind
from tfglm.layout import Family, Layout
from tfglm.memory.inventory import Inventory
from tfglm.settings import Settings

_BLOCK = 512
"""torch's allocator gives whole blocks."""
_WINDOW_ROWS = 16
"""Of a decode window, which decode kernels take."""
_LOGPROB_ROWS = 64
"""Of a chunk whose rows' logits are all wanted."""
_SCORE_BYTES = 64 << 20
_CANDIDATES = 16384
_KEY_COPIES = 7
"""In float32 copies of the scores, what makes int64 keys of them where caches are dealt out to ranks, beside them."""
_LIST_COPIES = 7
"""In int64 copies of the lists of a chunk, beside one of each rank's, what makes one list of them there; one of these
is for what a sort may take on a GPU."""
_ATTENTION_CHUNK = 64
_PROMPT_SLAB = 3072
_EXPERT_PIECE = 128
_SAMPLE_CHUNK = 1024
_LISTED_INTS = 20
_EXL3_BLOCK = 128


def held(*sizes: int) -> int:
    """Bytes of the allocator for tensors of so many bytes."""
    return sum(-(-size // _BLOCK) * _BLOCK for size in sizes)


@dataclass(frozen=True)
class Experts:
    """Of one layer with EXL3 experts. width: the most columns that an expert has on this rank. shared: gate and up of
    all have one input scale; fused: and each expert's are of equal bits."""

    width: int
    shared: bool
    fused: bool


@dataclass(frozen=True)
class Shapes:
    """What one rank computes with. heads, dense, shared, routed: of this rank at the most in any layer. vocabulary: of
    each rank. exl3: the kinds of EXL3 layers, none where experts are plain. mtp: the MTP layer drafts; tapped: layers
    whose streams a block drafter reads, `reads` rows of a chunk at the most; fills: bytes of the float32 keys and
    values of every head that a block of its drafts attends to. dealt: caches are (CP)."""

    config: ModelConfig
    ranks: int
    rank: int
    heads: int
    dense: int
    shared: int
    routed: int
    vocabulary: tuple[int, ...]
    exl3: frozenset[Experts]
    mtp: bool = False
    tapped: tuple[int, ...] = ()
    reads: int = 0
    fills: int = 0
    dealt: bool = False


def rank_shapes(inventory: Inventory, settings: Settings, rank: int) -> Shapes:
    """Of one rank of `settings.ranks`. Raises ConfigError for a drafter that the model cannot have."""
    config, ranks = inventory.config, settings.ranks
    layout, kind = Layout.of(config, ranks), drafter_kind(settings, config)
    layers = [layer for layer in range(config.num_hidden_layers) if config.mlp_layer_types[layer] == "sparse"]
    layers += [config.num_hidden_layers] if kind == "mtp" else []

    def most(family: Family) -> int:
        """Of the layers between which the first rank with a unit more goes round."""
        shares = (layout.share(family, turn, rank) for turn in range(ranks))
        return max(stop - start for start, stop in shares)

    vocabulary = (layout.share(Family.VOCABULARY, 0, other) for other in range(ranks))
    block = block_config(settings) if kind in ("dspark", "dflash2") else None
    return Shapes(
        config=config,
        ranks=ranks,
        rank=rank,
        heads=most(Family.HEADS),
        dense=most(Family.DENSE),
        shared=most(Family.SHARED),
        routed=most(Family.ROUTED),
        vocabulary=tuple(stop - start for start, stop in vocabulary),
        exl3=frozenset(found for layer in layers if (found := _exl3(inventory, layout, layer, rank))),
        mtp=kind == "mtp",
        tapped=block.layers if block else (),
        reads=block.window if block else 0,
        fills=8 * block.num_attention_heads * block.head_dim * (block.window + block.block_size) if block else 0,
        dealt=settings.cp,
    )


def _exl3(inventory: Inventory, layout: Layout, layer: int, rank: int) -> Experts | None:
    """None where the layer's experts are plain."""
    prefix, bits = f"model.layers.{layer}.mlp.experts.", inventory.exl3_bits
    experts = range(inventory.config.n_routed_experts)
    if f"{prefix}0.gate_proj" not in bits:
        return None
    shares = (layout.share(Family.ROUTED, layer, rank, expert) for expert in experts[: layout.ranks])
    paired = all(bits[f"{prefix}{n}.gate_proj"] == bits[f"{prefix}{n}.up_proj"] for n in experts)
    width, shared = max(stop - start for start, stop in shares), inventory.shared_scales
    return Experts(width, shared, shared and paired)


def gpu_buffers(shapes: Shapes, rows: int, context: int) -> int:
    """Bytes at the peak of chunks of up to `rows` rows of prompts of up to `context` tokens, and of windows."""
    sizes = (rows, 0), (_LOGPROB_ROWS, _LOGPROB_ROWS), (_WINDOW_ROWS, _WINDOW_ROWS)
    peaks = (_Chunk(shapes, count, context, wanted).peak() for count, wanted in sizes)
    return _windows(shapes.config) + _expert_space(shapes, rows) + max(peaks)


def _windows(config: ModelConfig) -> int:
    """Of logits and sampling, made at the start."""
    rows, columns = _WINDOW_ROWS, config.vocab_size
    bests = 16 * rows * -(-columns // _SAMPLE_CHUNK)
    return held(4 * rows * columns, bests, bests, 8 * rows * columns, 8 * rows, 40 * rows, 4 * rows)


def _expert_space(shapes: Shapes, rows: int) -> int:
    """Scratch of EXL3 experts, which stays."""
    config = shapes.config
    hidden, picks, experts = config.hidden_size, config.num_experts_per_tok, config.n_routed_experts
    room = 1 << (max(rows, 1) - 1).bit_length()
    total = 0
    for kind in shapes.exl3:
        lines = room if kind.fused else room * picks
        results = max(min(hidden, _PROMPT_SLAB) // 2, 0 if kind.fused else 2 * kind.width)
        total += held(2 * lines * hidden, 4 * experts * room, 4 * (1 + experts), 4)
        total += held(16 * (experts + room * picks // _EXPERT_PIECE), 2 * room * picks * kind.width)
        total += held(4 * room * picks * results)
    for width, shared in {(kind.width, kind.shared) for kind in shapes.exl3}:
        pairs = _WINDOW_ROWS * picks
        distinct, blocks = min(experts, pairs), hidden // _EXL3_BLOCK
        parts = next(parts for parts in (8, 6, 5, 4, 3, 2, 1) if blocks % parts == 0)
        total += held(2 * (_WINDOW_ROWS if shared else 2 * pairs) * hidden, 4 * distinct * _LISTED_INTS)
        total += held(4 * (1 + _WINDOW_ROWS), 4 * pairs * 2 * parts * width, 2 * pairs * width, 4 * pairs * hidden)
        total += held(4 * (distinct * (width // _EXL3_BLOCK) + _WINDOW_ROWS * blocks))
    return total


class _Chunk:
    """Of `rows` rows of one prompt, or of a decode window. x, f: a copy of the rows in bfloat16 and in float32; part:
    of a branch before ranks add theirs; total: of one that they have added, beside its part."""

    def __init__(self, shapes: Shapes, rows: int, context: int, wanted: int) -> None:
        self._shapes, self._config, self._rows, self._context = shapes, shapes.config, rows, context
        config, ranks = shapes.config, shapes.ranks
        self._x, self._f = held(2 * rows * config.hidden_size), held(4 * rows * config.hidden_size)
        self._part = self._f if ranks > 1 else self._x
        self._total = self._f if ranks > 1 else 0
        self._meeting = held(ranks * 4 * rows * config.hidden_size) + self._f if ranks > 1 else 0
        index = 8 if shapes.dealt else 4
        self._list = held(index * rows * config.index_topk, index * rows)
        pages, half = -(-context // PAGE), config.qk_rope_head_dim // 2
        streams = rows if rows <= _WINDOW_ROWS else 1
        self._inputs = held(8 * (4 * rows + streams * pages), 4 * rows * half, 4 * rows * half, 8 * max(wanted, 1))
        if shapes.dealt:  # which rows are its own, where they are, and how many tokens each sees here
            self._inputs += 4 * held(8 * rows)
        self._wanted = max(wanted, 1)
        self._attending = {full: self._attention(full) for full in (True, False)}
        self._feeding = {sparse: self._feed_forward(sparse) for sparse in (True, False)}

    def peak(self) -> int:
        peaks = [*self._trunk()]
        if self._shapes.mtp:
            peaks += self._mtp_layer()
        if self._shapes.tapped:
            peaks.append(self._block_drafter())
        return max(peaks)

    # ---- the trunk

    def _trunk(self) -> Iterator[int]:
        config, x, tapped = self._config, self._x, self._shapes.tapped
        base = self._inputs
        if self._shapes.rank:  # what the last chunk handed out is there until this one's is
            base += x * (len(tapped) + self._shapes.mtp)
        yield base + self._embedding()
        branch, part, chosen = x, 0, 0
        for layer in range(config.num_hidden_layers):
            outer = base + 2 * x + branch + part + chosen + x * sum(tap < layer for tap in tapped)
            yield outer + 2 * x
            yield outer + self._attending[config.indexer_types[layer] == "full"]
            yield outer - part + self._part + self._meeting
            part, chosen = self._part, self._list
            inner, result = self._feeding[config.mlp_layer_types[layer] == "sparse"]
            outer = base + 2 * x + part + self._total + chosen + x * sum(tap <= layer for tap in tapped)
            yield from (outer + 2 * x, outer + inner, outer + result + self._meeting)
            branch = self._total or result
        outer = base + 2 * x + branch + part + chosen + x * sum(tap < config.num_hidden_layers for tap in tapped)
        few = 5 * held(4 * self._wanted * config.hidden_size)
        yield outer + (2 * x if tapped or self._shapes.mtp else 0) + few + self._logits()

    def _embedding(self) -> int:
        """Rows of others are nothing here; rows and their float32 copy are there while ranks add theirs."""
        return self._x + self._f + max(self._meeting, self._f) if self._shapes.ranks > 1 else self._x

    def _logits(self) -> int:
        own, widest = self._shapes.vocabulary[self._shapes.rank], max(self._shapes.vocabulary)
        row = 4 * self._wanted
        if self._shapes.ranks == 1:
            return held(row * own)
        padded = 0 if own == widest else held(row * widest)
        return held(row * own, self._shapes.ranks * row * widest, row * self._config.vocab_size) + padded

    # ---- attention

    def _attention(self, full: bool) -> int:
        """What it makes itself, its part of the branch too; the list before is the caller's meanwhile."""
        config, rows, heads = self._config, self._rows, self._shapes.heads
        rotary, latent = config.qk_rope_head_dim, config.kv_lora_rank
        query = held(2 * rows * config.q_lora_rank)
        first = held(2 * rows * (config.q_lora_rank + latent + rotary)) + query
        absorbed = held(2 * rows * heads * latent)
        there = query + (self._list if full else 0) + held(2 * rows * heads * config.qk_head_dim) + 2 * absorbed
        if self._shapes.dealt:
            there += held(4 * rows * config.index_topk, 4 * rows)
        last = there + held(2 * rows * heads * config.v_head_dim) + self._part
        if rows <= _WINDOW_ROWS:
            heads *= self._shapes.ranks if self._shapes.dealt else 1  # of all ranks
            chunks = -(-min(self._context, config.index_topk) // _ATTENTION_CHUNK)
            there += held(4 * rows * chunks * heads * latent, 8 * rows * chunks * heads)
        return max(first, last, there, query + self._indexer() if full else 0)

    def _indexer(self) -> int:
        """With its list. What scores take hangs on the context, and a prompt passes through every one up to its own."""
        config, rows = self._config, self._rows
        width, heads = config.index_head_dim, config.index_n_heads
        queries = held(2 * rows * (width + heads), 2 * rows * heads * width)
        if not self._shapes.dealt:
            return queries + self._list + self._scores(-(-self._context // PAGE) * PAGE)
        lists = held(8 * rows * config.index_topk)
        stride = (-(-self._context // (self._shapes.ranks * PAGE)) + 1) * PAGE
        scores = self._piece(stride)
        before = 2 * scores if scores < held(4 * rows * stride) else 0  # keys of the piece before
        keys = _KEY_COPIES * scores + before + 3 * held(8 * stride)
        return queries + max(lists + scores + keys, (self._shapes.ranks + _LIST_COPIES) * lists)

    def _piece(self, stride: int) -> int:
        """Of the rows that are scored at once; of 8 at least."""
        return min(held(4 * self._rows * stride), max(_SCORE_BYTES, held(4 * 8 * stride)))

    def _scores(self, context: int) -> int:
        """With what is left of every row at each level of the selection: most where a context has just got a block."""
        if context <= self._config.index_topk:
            return 0
        return self._piece(context) + max(
            (self._levels(end) for end in range(_CANDIDATES + PAGE, context + 1, _CANDIDATES)), default=0
        )

    def _levels(self, context: int) -> int:
        count = self._config.index_topk
        piece = min(self._rows, max(8, _SCORE_BYTES // (4 * context) // 8 * 8))
        total, parts = 0, -(-context // _CANDIDATES)
        while parts > 1:
            total += 2 * held(4 * piece * parts * count)
            parts = -(-parts * count // _CANDIDATES)
        return total

    # ---- feed-forward

    def _feed_forward(self, sparse: bool) -> tuple[int, int]:
        """Bytes at its peak with its result, and those of the result."""
        config, rows = self._config, self._rows
        if not sparse:
            return self._mlp(self._shapes.dense, self._part), self._part
        picks, experts = config.num_experts_per_tok, config.n_routed_experts
        shared = self._mlp(self._shapes.shared, self._f)
        routed = self._f + held(4 * rows * picks, 4 * rows * picks)
        logits = routed + held(4 * rows * experts)
        if not self._shapes.exl3:
            pairs, most = rows * picks, min(experts, rows * picks)
            routed += held(4 * pairs, 4 * (most + 1), 4 * most)
            inner = self._shapes.routed
            routed += held(2 * pairs * 2 * inner, 2 * pairs * inner, 4 * pairs * config.hidden_size)
        return max(shared, logits, routed + self._f), self._f

    def _mlp(self, inner: int, result: int) -> int:
        half = held(2 * self._rows * inner)
        return max(held(4 * self._rows * inner) + half, half + result)

    # ---- drafters

    def _mtp_layer(self) -> Iterator[int]:
        """Rows that waited are there as the trunk handed them out, joined to one that waited before, and taken."""
        x = self._x
        base = self._inputs + x + held(2 * (self._rows + 1) * self._config.hidden_size) + x
        yield base + self._embedding()
        base += x  # embedded
        joined = held(4 * self._rows * self._config.hidden_size)
        yield base + 2 * x + joined
        base += joined + 2 * x
        yield base + self._attending[True]
        base += self._list + self._part
        inner, result = self._feeding[True]
        yield from (base + self._meeting, base + self._total + 2 * x, base + inner, base + result + self._meeting)

    def _block_drafter(self) -> int:
        """The streams, those of the rows it reads side by side, twice, and what it makes of them; or what a block
        attends to, while that of the stream before is there."""
        streams, read = len(self._shapes.tapped), min(self._rows, self._shapes.reads)
        row = held(2 * read * self._config.hidden_size)
        return max(self._inputs + self._x * streams + 2 * streams * row + 8 * row, 2 * self._shapes.fills)
