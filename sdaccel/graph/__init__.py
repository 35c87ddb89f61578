VERSION = "2"
"""Of the fusions, part of every engine's key: raise it when one changes what it writes."""
