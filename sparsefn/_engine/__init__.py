"""Exact selection, sums and draws behind the public modules, on CPU memory where it can
be read. See README.md.
"""
