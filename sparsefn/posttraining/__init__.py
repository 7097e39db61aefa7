"""Trained models and data: statistics of inputs, solvers and derivatives."""
