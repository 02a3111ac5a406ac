"""What every rank will hold, before anything is loaded: from configuration, headers and settings alone. Torch-free.

A rank's peak is weights, and beside them either what loading stages or what serving needs: caches, states, buffers,
exchanges, captured windows, indexes that copies are drafted from. Kept prompt states and the overhead of libraries come
on top; what is then left must not be below the floor, since a machine whose GPU shares its memory freezes instead of
failing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfglm.cache.disk import IN_MEMORY, IN_MEMORY_FOLLOWING
from tfglm.cache.pages import GATHERED_PAGES, PAGE
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.memory.buffers import gpu_buffers, rank_shapes
from tfglm.memory.demand import Planned, demand_of
from tfglm.memory.inventory import Inventory
from tfglm.settings import Settings, flag_name

GIB = 2**30
LARGEST_DEFAULT_CONTEXT = 131072
"""Window taken when none is asked for, even if more would fit: a cache is paid for whether it is used or not."""

_ROW_COPIES = 45
"""Where there is no account of tensors, on a CPU and for GLM-5.3-Flash: what a prompt row keeps alive at its peak, in
float32 copies of its hidden state. 1.05 GiB for 1,024 rows of 6,144 were published for GLM-5.3 on three ranks."""
_WINDOW_COPIES = 22
"""There too: what windows of up to 16 rows keep, in float32 copies of their logits; 0.2 GiB of a published 2.3."""
_WINDOW_ROWS = 16
_IN_PIECES = 4
"""A GPU's allocator keeps pieces that fit nothing beside what lives: one part in four of the buffers is allowed for
that, as overhead. Not measured."""
_STAGED = 3
"""Matrices beside the weights while a checkpoint is loaded, of the largest size."""
_EXCHANGE_BYTES = 512 * 1024
"""Of one slot of a small exchange; each rank has two slots a peer and two of its own."""
_GATHERED_COPIES = 3
"""Of the rows in one gather of a prompt under CP: as they came from the ranks, by position, and on their way through
host memory, which on a machine with one memory is the same memory."""
_GRAPH_BYTES = 72 * 1024
"""Of one layer in one captured window, beside scratch: 96 windows of 78 layers took 610 MiB on an H200, and as many of
their MTP layer 110."""
_GRAPH_SCRATCH = 256 << 20
"""That all captured windows share."""
_LEAST_CONTEXT_BITS = 12
"""The smallest context that windows are captured for is 4,096 tokens."""
_INDEXED = 160
"""Bytes a token of a copy index: 75 MB were measured for a text of 500,000."""


@dataclass(frozen=True)
class RankPlan:
    """Bytes of one rank. states: what requests hold whatever their length; copies: indexes that copies are drafted
    from, on rank 0; kept: of prompt states; disk: of those on their way to and from the disk; available: what the
    machine has."""

    rank: int
    experts: int
    dense: int
    vocabulary: int
    drafter: int
    staging: int
    caches: int
    states: int
    copies: int
    buffers: int
    exchanges: int
    graphs: int
    kept: int
    disk: int
    overhead: int
    available: int

    @property
    def weights(self) -> int:
        return self.experts + self.dense + self.vocabulary + self.drafter

    @property
    def total(self) -> int:
        """The engine's own peak."""
        serving = self.caches + self.states + self.copies + self.buffers + self.exchanges + self.graphs
        return self.weights + max(self.staging, serving)

    @property
    def need(self) -> int:
        return self.total + self.kept + self.disk + self.overhead

    @property
    def lowest_free(self) -> int:
        return self.available - self.need


@dataclass(frozen=True)
class Plan:
    """context: the window of one request; tokens: what a rank's cache holds for all requests and kept states, in whole
    pages; largest: the largest window that fits, 0 if none does. floor: bytes that must stay free."""

    name: str
    context: int
    tokens: int
    kept_pages: int
    bytes_per_token: int
    largest: int
    floor: int
    ranks: tuple[RankPlan, ...]

    @property
    def tightest(self) -> RankPlan:
        return min(self.ranks, key=lambda rank: rank.lowest_free)

    @property
    def shortfall(self) -> int:
        """Bytes by which the tightest rank misses the floor; 0 if all fit."""
        return max(0, self.floor - self.tightest.lowest_free)


def make_plan(inventory: Planned, settings: Settings, available: Sequence[int]) -> Plan:
    """The plan of a model over settings.ranks ranks which have `available` bytes each.

    context 0 takes the largest window up to LARGEST_DEFAULT_CONTEXT and the model's own that fits, or a page if none
    does. Raises ConfigError for settings that exclude each other; whether the plan fits is for `require` to say.
    """
    _check(settings)
    planner = _Planner(inventory, settings, available)
    largest = planner.largest()
    longest = inventory.config.max_position_embeddings
    context = min(settings.context or min(LARGEST_DEFAULT_CONTEXT, max(largest, PAGE)), longest)
    return Plan(
        name=inventory.name,
        context=context,
        tokens=planner.tokens(context),
        kept_pages=planner.kept_pages,
        bytes_per_token=planner.per_token,
        largest=largest,
        floor=planner.floor,
        ranks=planner.ranks(context),
    )


Change = Mapping[str, object]
CPU_CHANGES: tuple[Change, ...] = (
    {"parallel": 1},
    {"drafter": "none"},
    {"kept_gib": 0.0},
    {"kv": "fp8"},
    {"kv": "fp4"},
)
"""Settings that ease a machine that serves on its CPU."""
GPU_CHANGES: tuple[Change, ...] = (
    *CPU_CHANGES,
    {"prefill_rows": 1024},
    {"dense": "q4"},
    {"head": "fp8"},
    {"cp": True},
)


def require(plan: Plan, inventory: Planned, settings: Settings, changes: Sequence[Change]) -> None:
    """Raise MemoryShortError with the shortfall, the window that would fit and what each of `changes` would save."""
    if not plan.shortfall:
        return
    rank = plan.tightest
    where = f"rank {rank.rank}" if len(plan.ranks) > 1 else "this machine"
    fits = f"--context {plan.largest} fits" if plan.largest else "no window fits"
    saved = "; ".join(
        f"{text} saves {saves / GIB:.2f} GiB" for text, saves in savings(inventory, settings, plan, changes)
    )
    raise MemoryShortError(
        f"{settings.parallel} x {plan.context} tokens of window need {rank.need / GIB:.2f} GiB on {where} (weights "
        f"{rank.weights / GIB:.2f}, cache {plan.bytes_per_token} bytes a token) and {plan.floor / GIB:.2f} must stay "
        f"free; {rank.available / GIB:.2f} GiB are available, {plan.shortfall / GIB:.2f} too few: {fits}"
        + (f"; {saved}" if saved else "")
    )


def savings(inventory: Planned, settings: Settings, plan: Plan, changes: Sequence[Change]) -> list[tuple[str, int]]:
    """Those of `changes` that would ease the tightest rank, and the bytes that each alone frees there; most first."""
    found = []
    asked = dataclasses.replace(settings, context=plan.context)
    available = [rank.available for rank in plan.ranks]
    for change in changes:
        other = dataclasses.replace(asked, **change)  # type: ignore[arg-type]
        try:
            eased = make_plan(inventory, other, available)
        except ConfigError:  # not with this model or this number of ranks
            continue
        saves = plan.tightest.need - eased.ranks[plan.tightest.rank].need
        if saves >= 0.005 * GIB:  # less would read as 0.00 GiB
            words = (f"{flag_name(name)} {_plain(value)}" for name, value in change.items())
            found.append((" ".join(words), saves))
    return sorted(found, key=lambda item: -item[1])


def _plain(value: object) -> object:
    """As one would type it: 1 for True, 0 for 0.0."""
    return int(value) if isinstance(value, bool | float) and value == int(value) else value


def _check(settings: Settings) -> None:
    if settings.cp and settings.ranks == 1:
        raise ConfigError("--cp is 1, but there is one rank; context parallelism needs --ranks 2 or more")
    if settings.guard_gib and settings.guard_gib >= max(settings.floor_gib, 1e-9):
        raise ConfigError(
            f"--guard-gib is {settings.guard_gib} and --floor-gib {settings.floor_gib}; the guard would stop what the "
            "plan allows: it must be below the floor"
        )


class _Planner:
    """The figures that do not depend on the window, and those that do as functions of it."""

    def __init__(self, inventory: Planned, settings: Settings, available: Sequence[int]) -> None:
        self._demand = demand_of(inventory, settings)
        self._settings, self._available = settings, available
        self._cut = settings.ranks if settings.cp else 1
        ranks = range(settings.ranks) if isinstance(inventory, Inventory) else ()
        self._shapes = [rank_shapes(inventory, settings, rank) for rank in ranks]  # type: ignore[arg-type]
        self._accounted = bool(self._shapes) and settings.device != "cpu"
        self.per_token = self._demand.per_token
        self.floor = round(settings.floor_gib * GIB)
        self.kept_pages = int(settings.kept_gib * GIB) // (self.per_token * PAGE)

    def tokens(self, context: int) -> int:
        """Tokens a rank caches: its part of every window, in whole pages, and the kept pages."""
        return (self._window_pages(context) * self._settings.parallel + self.kept_pages) * PAGE

    def ranks(self, context: int) -> tuple[RankPlan, ...]:
        return tuple(self._rank(rank, context) for rank in range(self._settings.ranks))

    def largest(self) -> int:
        """The largest window of whole pages that leaves every rank its floor, at most the model's own."""
        longest = self._demand.longest
        low, high = 0, -(-longest // PAGE)
        while low < high:
            middle = (low + high + 1) // 2
            if all(rank.lowest_free >= self.floor for rank in self.ranks(middle * PAGE)):
                low = middle
            else:
                high = middle - 1
        return min(low * PAGE, longest)

    def _window_pages(self, context: int) -> int:
        local = -(-context // self._cut) + (1 if self._cut > 1 else 0)
        return -(-local // PAGE)

    def _rank(self, rank: int, context: int) -> RankPlan:
        settings, held = self._settings, self._demand.weights[rank]
        pages = self._window_pages(context) * settings.parallel
        buffers = self._buffers(rank, context)
        pieces = buffers // _IN_PIECES if self._accounted else 0
        in_transit = IN_MEMORY if rank == 0 else IN_MEMORY_FOLLOWING
        return RankPlan(
            rank=rank,
            experts=held.experts,
            dense=held.dense,
            vocabulary=held.vocabulary,
            drafter=self._demand.drafter[rank],
            staging=_STAGED * held.largest,
            caches=(pages + (self._cut > 1)) * PAGE * self.per_token,  # a page more for rows that others cache
            states=self._demand.per_request[rank] * settings.parallel,
            copies=self._copies(context) if rank == 0 else 0,
            buffers=buffers,
            exchanges=self._exchanges(context),
            graphs=self._graphs(context),
            kept=self.kept_pages * PAGE * self.per_token,
            disk=in_transit * PAGE * self.per_token if settings.disk_cache else 0,
            overhead=round(settings.overhead_gib * GIB) + pieces,
            available=self._available[rank],
        )

    def _graphs(self, context: int) -> int:
        """Decode windows of every number of rows at every power of two of context: what a server on a GPU captures."""
        settings = self._settings
        if settings.graphs_gib or settings.device != "cuda":
            return round(settings.graphs_gib * GIB)
        drafts = settings.copy or settings.drafter != "none"
        rows = _WINDOW_ROWS if drafts else settings.parallel
        contexts = max(1, (context - 1).bit_length() - _LEAST_CONTEXT_BITS + 1)
        return rows * contexts * self._demand.layers * _GRAPH_BYTES + _GRAPH_SCRATCH

    def _copies(self, context: int) -> int:
        settings = self._settings
        return _INDEXED * (context * settings.parallel + settings.copy_corpus) if settings.copy else 0

    def _buffers(self, rank: int, context: int) -> int:
        """A GPU's are accounted for tensor by tensor; a CPU's, of another kind, are no less."""
        settings, demand = self._settings, self._demand
        accounted = gpu_buffers(self._shapes[rank], settings.prefill_rows, context) if self._shapes else 0
        if self._accounted:
            return accounted
        rows = -(-settings.prefill_rows // settings.ranks) * settings.ranks
        windows = _WINDOW_COPIES * _WINDOW_ROWS * demand.vocab_size * 4
        return max(accounted, windows + rows * _ROW_COPIES * demand.hidden_size * 4)

    def _exchanges(self, context: int) -> int:
        """Slots of small exchanges; under CP also one layer's rows of the whole window, gathered for a prompt. Through
        gloo, what a chunk's sum takes in host memory, which on a GPU machine with one memory is the same."""
        settings, ranks = self._settings, self._settings.ranks
        if ranks == 1:
            return 0
        pieces = _GATHERED_COPIES * min(context, ranks * GATHERED_PAGES * PAGE)
        gathered = (context + pieces) * self._demand.gathered if self._cut > 1 else 0
        through_host = settings.wire == "gloo" and settings.device != "cpu"
        staged = (ranks + 1) * settings.prefill_rows * self._demand.hidden_size * 4 if through_host else 0
        return 2 * ranks * _EXCHANGE_BYTES + gathered + staged
