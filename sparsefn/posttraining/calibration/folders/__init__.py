"""Prunes and scores models that need not fit in memory, from folder to folder."""

from sparsefn.posttraining.calibration.folders.depth_scores import (
    LayerScores,
    layer_scores,
)
from sparsefn.posttraining.calibration.folders.removal import drop_layers
from sparsefn.posttraining.calibration.folders.stream import stream

__all__ = ["LayerScores", "drop_layers", "layer_scores", "stream"]
