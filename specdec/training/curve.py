"""Plot of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(content: dict[str, Any], path: Path) -> None:
    """Plot loss and acceptance of `evaluation.json` against training tokens. Does nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    log, tokens = content["log"], content["tokens_per_epoch"] / 1e6
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)

    def line(axes: Any, key: str, label: str, style: str = "-") -> None:
        points = [(entry["epoch"] * tokens, entry[key]) for entry in log if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)

    line(left, "loss", "training batches")
    line(left, "eval_loss", "held-out texts", "s:")
    left.legend(fontsize="small")
    left.set(xlabel="training tokens (millions)", ylabel="loss")
    line(right, "simulated_length", "training batches, steps taken as independent")
    line(right, "eval_simulated_length", "held-out texts, the same", "D:")
    line(right, "decoder_simulated_length", "held-out prompts, simulated", "s:")
    line(right, "decoder_mean_acceptance_length", "held-out prompts, decoder: chains", "o-")
    line(right, "decoder_tree_length", "decoder: trees", "^-")
    line(right, "decoder_tree_length_sampled", "decoder: trees, T = 1", "v-")
    right.set(xlabel="training tokens (millions)", ylabel="mean acceptance length")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)
