"""What a quantisation is to be: widths, codebook, and how the calibration is used."""

from __future__ import annotations

from dataclasses import dataclass

from tfglm.errors import CheckpointError, ConfigError
from tfglm.formats.exl3_code import half_bits


@dataclass(frozen=True)
class Recipe:
    """bits: mean width of a routed expert's weight. widths: on offer, ascending. shared_suh: one input scale vector a
    layer for gate and up of all experts, so that a row is rotated once. rare_share: an expert counts as at least this
    share of the mean expert's importance when widths are given out.

    Raises ConfigError for a mean that the widths cannot have or a width that the codebook lacks.
    """

    bits: float
    widths: tuple[float, ...]
    codebook: str = "mcg"
    shared_suh: bool = True
    rare_share: float = 0.1

    def __post_init__(self) -> None:
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths are {_listed(self.widths)}; different widths in ascending order are needed")
        try:
            for width in self.widths:
                half_bits(width, self.codebook)
        except CheckpointError as error:
            raise ConfigError(error.message) from None
        if not self.widths[0] <= self.bits <= self.widths[-1]:
            raise ConfigError(
                f"a mean of {self.bits:g} bits is outside the widths {_listed(self.widths)}; "
                f"give a mean between them or other widths"
            )


def _listed(widths: tuple[float, ...]) -> str:
    return ", ".join(f"{width:g}" for width in widths) or "none"
