"""One module a system; `in_torch.py` and `laws.py` say what it may define."""
