"""Modules of torch.nn and optimizers of torch.optim: parameters in, masks out."""
