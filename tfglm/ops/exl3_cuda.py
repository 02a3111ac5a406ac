"""EXL3 tiles on the GPU: decode to fp16, and the search that makes them (kernels exl3_reconstruct, exl3_encode)."""

from __future__ import annotations

import torch

from tfglm.errors import CheckpointError
from tfglm.ops import driver

CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
ENCODE_BITS = (2, 3, 4, 5)
_SEARCH_THREADS = 512


def codebook_macros(codebook: str) -> dict[str, str]:
    """Macros that build a kernel file for one codebook."""
    return {"CODEBOOK": str(CODEBOOKS[codebook])}


def decode_tiles(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """int16 [k/16, n/16, 16 * bits] on the GPU -> float16 [k, n]: the weights in the rotated basis, bit exact."""
    rows, columns, words = trellis.shape
    out = torch.empty(rows * 16, columns * 16, dtype=torch.float16, device=trellis.device)
    kernel = driver.load("exl3_reconstruct", codebook_macros(codebook)).kernel("exl3_reconstruct")
    kernel((-(-columns // 8), rows), 256, (trellis.contiguous(), out, words // 8, rows * 16, columns * 16))
    return out


def codebook_table(codebook: str) -> torch.Tensor:
    """float16 [65536] on the current GPU: the weight of every state."""
    out = torch.empty(1 << 16, dtype=torch.float16, device="cuda")
    driver.load("exl3_reconstruct", codebook_macros(codebook)).kernel("exl3_codebook")((256,), 256, (out,))
    return out


def encode_tiles(tiles: torch.Tensor, bits: int, codebook: str, *, workspace: int = 4 << 30) -> torch.Tensor:
    """float32 [t, 256] in stream order, scaled to the codebook -> uint16 [t, 256] on the same GPU: closed rings.

    The states are those of tfglm.formats.exl3_viterbi with fp16 costs. workspace: bytes that the search may use for its
    histories (1 MiB a tile below 4 bits, half of that above). Raises CheckpointError for a width the kernel lacks.
    """
    if bits not in ENCODE_BITS:
        raise CheckpointError(f"the GPU search makes tiles of {ENCODE_BITS} bits, not {bits}; use the CPU search")
    words = 2 if bits < 4 else 1
    together = _tiles_together(len(tiles), workspace // (256 * _SEARCH_THREADS * words * 4), tiles.device)
    wanted = tiles.to(torch.float16).contiguous()
    states = torch.empty(tiles.shape, dtype=torch.uint16, device=tiles.device)
    node = torch.empty(together, dtype=torch.uint16, device=tiles.device)
    history = torch.empty(together, 256, _SEARCH_THREADS, words, dtype=torch.int32, device=tiles.device)
    module = driver.load("exl3_encode", codebook_macros(codebook))
    walk, trace = module.kernel(f"exl3_walk_{bits}"), module.kernel(f"exl3_trace_{bits}")
    for first in range(0, len(tiles), together):
        x, found = wanted[first : first + together], states[first : first + together]
        count, shared = len(x), 1 << (18 - bits)
        # Once round with free ends: only the node between the last position and the first is kept. Then from it to it.
        walk((count,), _SEARCH_THREADS, (x, None, history, node), shared=shared)
        trace((-(-count // 32),), 32, (history, node, None, count))
        walk((count,), _SEARCH_THREADS, (x, node, history, None), shared=shared)
        trace((-(-count // 32),), 32, (history, node, found, count))
    return states


def _tiles_together(tiles: int, room: int, device: torch.device) -> int:
    """Tiles searched in one launch: what fits, in whole waves of one tile a multiprocessor."""
    wave = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tiles, max(1, room // wave * wave if room >= wave else room))
