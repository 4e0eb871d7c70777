"""Symbolic values: dtypes, layouts, what an operation is, tensors, and ordered graphs of them."""
