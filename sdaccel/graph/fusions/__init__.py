"""Fusions: one a file. Each is a function ``fuse(model) -> Outcome`` that rewrites the graph in place."""
