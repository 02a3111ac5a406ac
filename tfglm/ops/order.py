"""One total order for every choice the model makes: higher value first, then the lower index; -0 counts as +0.

torch.topk leaves ties open, and ties are common here (an index score is exactly 0 when every relu is off). So a value
and its index are packed into one int64 key; keys are distinct, so any correct selection of them is the same
selection.
"""

from __future__ import annotations

import torch

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1

NO_KEY = torch.iinfo(torch.int64).min
"""Below every key: stands where there are fewer values than places."""


def keys(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """int64 keys whose descending order is the total order. values float32 and indices int64 (0..2^32-1) broadcast."""
    bits = (values + 0.0).view(torch.int32)  # adding +0 turns -0 into +0 and changes nothing else
    # Negative floats order backwards by their bits; flipping the magnitude bits makes int32 order float order.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << _INDEX_BITS) | (_INDEX_MASK - indices)


def indices_of(packed: torch.Tensor) -> torch.Tensor:
    """The index in each key."""
    return _INDEX_MASK - (packed & _INDEX_MASK)


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` best of each row, best first: [R, N] float32 -> [R, count] int64."""
    columns = torch.arange(values.shape[-1], device=values.device)
    return indices_of(torch.topk(keys(values, columns), count, dim=-1).values)
