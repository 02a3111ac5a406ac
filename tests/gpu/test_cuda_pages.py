"""Pages of the cache on their way to a disk: the very bytes, and no round waits for them."""

import threading

import pytest
import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE
from tfglm.cache.tier import Pages

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000_000
"""Of a GPU that waits: a second or so."""


def layers(device: torch.device) -> list[LayerPlanes]:
    def plane(width: int) -> torch.Tensor:
        return torch.randint(0, 256, (5, PAGE, width), dtype=torch.uint8, device=device)

    return [LayerPlanes(plane(528), plane(64), plane(132) if number % 3 == 0 else None) for number in range(7)]


def test_a_page_comes_back_as_it_was(device: torch.device) -> None:
    planes = layers(device)
    pages = Pages(planes)
    want = [
        plane[3].clone() for layer in planes for plane in (layer.latent, layer.rope, layer.index) if plane is not None
    ]
    data = pages.read(3)
    assert bytes(data) == b"".join(part.cpu().numpy().tobytes() for part in want)
    pages.write(1, data)
    assert pages.read(1) == data and pages.read(2) != data


def test_a_page_is_read_once_its_rows_are_there(device: torch.device) -> None:
    """Its rows may still be queued behind other work when it is asked for."""
    planes = layers(device)
    pages = Pages(planes)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    for layer in planes:
        layer.latent[4].fill_(7)
        layer.rope[4].fill_(9)
    found = pages.read(4)
    assert found == b"".join(
        plane[4].cpu().numpy().tobytes()
        for layer in planes
        for plane in (layer.latent, layer.rope, layer.index)
        if plane is not None
    )
    assert found.startswith(b"\7" * PAGE * 528 + b"\t" * PAGE * 64)


def test_a_round_does_not_wait_for_the_copies(device: torch.device) -> None:
    """Work that is launched while a page is being copied ends before the copy does."""
    pages = Pages(layers(device))
    torch.ones(1, device=device).add_(1)  # kernels are loaded when they are first used, and that waits for everything
    pages.read(2)
    torch.cuda.synchronize()
    assert pages._stream is not None
    with torch.cuda.stream(pages._stream):
        torch.cuda._sleep(CYCLES)  # a copy that takes a second
    reader = threading.Thread(target=pages.read, args=(2,))
    reader.start()
    done = torch.cuda.Event()
    torch.ones(1, device=device).add_(1)
    done.record()
    done.synchronize()
    assert reader.is_alive() and not pages._stream.query()
    reader.join(30)
