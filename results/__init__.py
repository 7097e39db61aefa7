"""Published claims about sparse training and pruning, measured: `python -m results`
runs them and writes the page.
"""
