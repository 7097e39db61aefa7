"""Prunes models that need not fit in memory, from folder to folder."""

from sparsefn.posttraining.calibration.folders.stream import stream

__all__ = ["stream"]
