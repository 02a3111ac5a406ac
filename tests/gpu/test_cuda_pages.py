"""Pages of the cache on their way to a disk: the very bytes, and no round waits for them."""

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


def test_a_page_is_read_while_a_round_runs(device: torch.device) -> None:
    planes = layers(device)
    pages = Pages(planes)
    want = pages.read(4)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    found = pages.read(4)
    busy = not torch.cuda.current_stream(device).query()
    torch.cuda.synchronize()
    assert found == want
    assert busy, "the copy waited for what ran before it"
