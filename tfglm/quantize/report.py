"""The figures of a finished quantisation as a table to read."""

from __future__ import annotations

from tfglm.quantize.run import Report

_COLUMNS = ("layer", "bits", "matrices of each width", "proxy error", "NMSE", "MB", "s")


def table(report: Report) -> list[tuple[str, ...]]:
    """The head, a row a layer, and one for all layers."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for layer in report.layers:
        widths = ", ".join(f"{count} x {width}" for width, count in layer.widths.items())
        rows.append(
            (
                str(layer.layer),
                f"{layer.bits:.3f}",
                widths,
                f"{layer.proxy_error:.5f}",
                f"{layer.nmse:.5f}",
                f"{layer.nbytes / 1e6:,.1f}",
                f"{layer.seconds:,.0f}",
            )
        )
    count = max(len(report.layers), 1)
    rows.append(
        (
            "all",
            f"{report.bits:.3f}",
            "",
            f"{sum(layer.proxy_error for layer in report.layers) / count:.5f}",
            f"{sum(layer.nmse for layer in report.layers) / count:.5f}",
            f"{sum(layer.nbytes for layer in report.layers) / 1e6:,.1f}",
            f"{sum(layer.seconds for layer in report.layers):,.0f}",
        )
    )
    return rows
