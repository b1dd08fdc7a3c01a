"""Plots the reward curve in the terminal and as a PNG."""

from pathlib import Path

import matplotlib as mpl
import plotext

mpl.use("Agg")

from matplotlib import pyplot


def plot_terminal(rewards: list[float]) -> None:
    """Plots the curve in the terminal."""
    plotext.clear_figure()
    plotext.plot(list(range(1, len(rewards) + 1)), rewards, marker="braille")
    plotext.ylim(0, 1)
    plotext.plotsize(72, 16)
    plotext.title("reward by step")
    plotext.theme("clear")
    plotext.show()


def plot_png(rewards: list[float], path: Path) -> None:
    """Writes the curve as a PNG."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO through the mesh")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
