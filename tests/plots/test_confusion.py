"""The figure of a confusion matrix: white where there is nothing, one color, and numbers that can be read."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb

from vitlab.plots.scores import confusion_figure


def luminance(color: tuple[float, ...]) -> float:
    """The relative luminance of a color by WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_shares_go_from_white_to_one_color_and_counts_stand_out() -> None:
    shares = np.linspace(0, 1, 13)
    matrix = np.stack([np.round(100 * shares), 100 - np.round(100 * shares)], 1).astype(np.int64)
    square = np.zeros((13, 13), np.int64)
    square[:, :2] = matrix
    axes = confusion_figure(square, [f"kind {i}" for i in range(13)]).axes[0]
    (image,) = axes.images
    values = image.get_array()
    assert values is not None
    cells = image.to_rgba(values)
    assert np.allclose(cells[0, 0, :3], 1)  # no images
    fills = [luminance(cell) for cell in cells[:, 0]]
    assert (np.diff(fills) < 0).all()
    assert len(axes.texts) == 24
    for text in axes.texts:
        x, y = text.get_position()
        pair = luminance(cells[int(y), int(x)]), luminance(to_rgb(text.get_color()))
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5
