"""What the public parts run on: exact selection, sums and draws, on CPU memory where it can be read. See README.md."""
