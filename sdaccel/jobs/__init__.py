"""Batch generation: job files, a journal that draws each image once, workers here or on a Ray cluster, files."""
