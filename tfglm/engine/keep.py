"""The prompt states of a served model as its settings want them: in memory, and on a disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from tfglm import __version__
from tfglm.cache.disk import PageStore
from tfglm.cache.identity import code_digest, identity
from tfglm.cache.kept import KeptStates
from tfglm.cache.latent import LayerPlanes
from tfglm.cache.leftovers import other_folders, rank_folder
from tfglm.cache.pages import PAGE
from tfglm.cache.ranked_disk import DiskFollower, RankedDiskTier
from tfglm.cache.tier import DiskTier, Pages
from tfglm.engine.machine import computing_facts
from tfglm.engine.states import PromptStates
from tfglm.errors import ConfigError
from tfglm.models.glm53 import Glm53
from tfglm.ops.reference import ReferenceOps
from tfglm.settings import Settings

log = logging.getLogger(__name__)

GIB = 2**30


def prompt_states(
    checkpoint: Path, model: Glm53, kept_pages: int, settings: Settings, beside: Sequence[LayerPlanes] = ()
) -> PromptStates:
    """States in up to `kept_pages` pages of the model's cache and, if settings.disk_cache names one, in a folder. What
    memory keeps is written there; without pages in memory there is nothing to write. beside: planes of a drafter on the
    same pages, which are written with the model's.

    Raises ConfigError for a folder that cannot be used.
    """
    if not kept_pages:
        if settings.disk_cache:
            mib = model.cache.bytes_per_token * PAGE / 2**20
            raise ConfigError(
                f"--disk-cache is {settings.disk_cache!r} and --kept-gib {settings.kept_gib}, which holds no page of "
                f"{mib:.1f} MiB; what is kept on the disk is first kept in memory"
            )
        return PromptStates()
    replies = model.decodes_alike
    if not settings.disk_cache:
        return PromptStates(KeptStates(model.cache.pool, kept_pages), replies=replies)
    pages = Pages([*model.cache.layers, *beside])
    store, known = _store(checkpoint, model, pages, settings)
    kept = KeptStates(model.cache.pool, kept_pages, known)
    if model.group.ranks > 1:
        return PromptStates(kept, RankedDiskTier(kept, pages, store, model.group), replies=replies)
    return PromptStates(kept, DiskTier(kept, pages, store), replies=replies)


def disk_follower(
    checkpoint: Path, model: Glm53, kept_pages: int, settings: Settings, beside: Sequence[LayerPlanes] = ()
) -> DiskFollower | None:
    """What another rank does for rank 0's `prompt_states`: keep its own part of every page on its own disk. None if
    nothing is to be kept there. Raises ConfigError for a folder that cannot be used."""
    if not kept_pages or not settings.disk_cache:
        return None
    pages = Pages([*model.cache.layers, *beside])
    return DiskFollower(pages, _store(checkpoint, model, pages, settings)[0], model.group)


def _store(checkpoint: Path, model: Glm53, pages: Pages, settings: Settings) -> tuple[PageStore, bytes]:
    """The files of this rank's pages, and the identity of what they hold."""
    group = model.group
    known = identity(checkpoint, _facts(model, settings) | {"bytes": pages.nbytes})
    parent = Path(settings.disk_cache)
    store = PageStore(
        rank_folder(parent, group.rank, group.ranks),
        known,
        pages.nbytes,
        beside=other_folders(parent, group.ranks),
        limit=round(settings.disk_cache_gib * GIB),
        keep_free=keep_free(settings),
    )
    if not store.takes_more:
        log.warning(
            "W_DISK_CACHE: %s has %.1f GiB free and --disk-keep-free-gib is %.1f: nothing new is stored there before "
            "it has more or that is less; what is there is still read",
            settings.disk_cache,
            shutil.disk_usage(settings.disk_cache).free / GIB,
            keep_free(settings) / GIB,
        )
    return store, known


def keep_free(settings: Settings) -> int:
    """Bytes that the disk cache leaves free on its disk."""
    if settings.disk_keep_free_gib >= 0:
        return round(settings.disk_keep_free_gib * GIB)
    folder = Path(settings.disk_cache)
    while not folder.exists():  # it is made later
        folder = folder.parent
    return min(100 * GIB, shutil.disk_usage(folder).total // 10)


def _facts(model: Glm53, settings: Settings) -> dict[str, object]:
    """Everything besides the checkpoint that the bits of a cached row may depend on."""
    rows = sorted(vars(model.ops.rows).items()) if isinstance(model.ops, ReferenceOps) else []
    ranks = {"ranks": model.group.ranks, "placement": model.placement.value}
    page = {"page": model.page_tokens, "rows": rows}
    return computing_facts(settings) | {"tfglm": __version__, "code": code_digest()} | ranks | page
