"""Draws docs/curve.svg from the table in docs/demo-curves.md.

    python -m scripts.curve

The table is what three runs of `make demo` measured.
"""

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "demo-curves.md"
CURVE = ROOT / "docs" / "curve.svg"
_ROW = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)


def measured(text: str) -> list[tuple[float, ...]]:
    """Returns the rows of the table: the step, and the reward of each seed."""
    return [tuple(float(cell) for cell in row) for row in _ROW.findall(text)]


def draw(rows: list[tuple[float, ...]], path: Path) -> None:
    """Writes the curve. The same rows give the same bytes."""
    steps, *seeds = zip(*rows, strict=True)
    mpl.rcParams.update({"svg.hashsalt": "rollmesh", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for seed, rewards in enumerate(seeds):
        axes.plot(steps, rewards, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="mean reward", xlim=(1, steps[-1]), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(measured(TABLE.read_text("utf-8")), CURVE)
