"""One process has no copies to compare; test_edges.py has several."""

import torch

import sparsefn as sf


def test_one_process_has_nothing_to_compare():
    sf.distributed.check_replicas(sf.static(0.5).init({"w": torch.ones(4, 4)}))
