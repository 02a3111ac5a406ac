"""The cut over ranks: GLM-5.3's own numbers, and what must hold for any model and number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfglm.errors import ConfigError
from tfglm.layout import UNIT, Family, Layout, Placement

GLM53 = Layout(3, 64, 2048, 2048, 12288, 154880, Placement.BY_LAYER)
MOE_LAYERS = range(3, 79)


def widths(layout: Layout, family: Family, layer: int, expert: int = 0) -> list[int]:
    shares = [layout.share(family, layer, rank, expert) for rank in range(layout.ranks)]
    return [stop - start for start, stop in shares]


def blocks(layout: Layout, family: Family, layer: int, expert: int = 0) -> list[int]:
    return [width // 128 for width in widths(layout, family, layer, expert)]


def test_heads_dense_and_vocabulary_of_glm53() -> None:
    for layer in (0, 1, 2, 77):
        assert widths(GLM53, Family.HEADS, layer) == [22, 21, 21]
        assert widths(GLM53, Family.DENSE, layer) == [4096, 4096, 4096]
        assert widths(GLM53, Family.VOCABULARY, layer) == [51648, 51648, 51584]


def test_extra_expert_block_rotates_by_layer() -> None:
    assert blocks(GLM53, Family.ROUTED, 3) == [6, 5, 5]
    assert blocks(GLM53, Family.SHARED, 3) == [5, 6, 5]
    assert blocks(GLM53, Family.ROUTED, 4) == [5, 6, 5]
    assert blocks(GLM53, Family.SHARED, 4) == [5, 5, 6]
    assert blocks(GLM53, Family.ROUTED, 5) == [5, 5, 6]
    assert blocks(GLM53, Family.SHARED, 5) == [6, 5, 5]
    totals = [sum(widths(GLM53, Family.ROUTED, layer)[rank] for layer in MOE_LAYERS) for rank in range(3)]
    assert totals == [51968, 51840, 51840]


def test_extra_expert_block_by_expert() -> None:
    layout = Layout(**{**vars(GLM53), "placement": Placement.BY_EXPERT})
    assert [blocks(layout, Family.ROUTED, 3, expert) for expert in range(3)] == [[6, 5, 5], [5, 6, 5], [5, 5, 6]]
    per_layer = [sum(widths(layout, Family.ROUTED, 3, expert)[rank] for expert in range(256)) for rank in range(3)]
    assert max(per_layer) - min(per_layer) == 128
    # The shared expert is one matrix a layer and stays where it is.
    assert blocks(layout, Family.SHARED, 3, 7) == [5, 6, 5]


@pytest.mark.parametrize("ranks", [0, 9, -1])
def test_impossible_rank_counts_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 8 ranks; {ranks} "):
        Layout(ranks, 64, 2048, 2048, 12288, 154880)


@given(
    ranks=st.integers(1, 8),
    units=st.integers(1, 40),
    ragged=st.integers(0, 63),
    layer=st.integers(0, 100),
    expert=st.integers(0, 255),
    family=st.sampled_from(Family),
    placement=st.sampled_from(Placement),
)
def test_shares_cover_everything_once_in_whole_units(
    ranks: int, units: int, ragged: int, layer: int, expert: int, family: Family, placement: Placement
) -> None:
    unit = UNIT[family]
    size = units * unit - ragged % unit
    layout = Layout(ranks, size, size, size, size, size, placement)
    end, found = 0, []
    for rank in range(ranks):
        start, stop = layout.share(family, layer, rank, expert)
        assert start == end and start <= stop <= size
        assert start % unit == 0 or start == size
        found.append(stop - start)
        end = stop
    assert end == size
    whole_units = [-(-width // unit) for width in found]
    assert max(whole_units) - min(whole_units) <= 1
    assert max(found) <= layout.largest(family)


@given(ranks=st.integers(1, 8), units=st.integers(1, 40))
def test_over_a_turn_of_layers_every_rank_holds_the_same(ranks: int, units: int) -> None:
    layout = Layout(ranks, 1, units * 128, units * 128, 128, 64)
    for family in (Family.ROUTED, Family.SHARED):
        totals = [sum(widths(layout, family, layer)[rank] for layer in range(ranks)) for rank in range(ranks)]
        assert len(set(totals)) == 1
        assert layout.largest(family) == max(widths(layout, family, 0))
