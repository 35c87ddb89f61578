"""LoRA files and their relatives: formats → layers → weight deltas."""

from sdaccel.adapters.file import Adapter, Fit, Fitted, read_adapter
from sdaccel.adapters.layer import Layer

__all__ = ["Adapter", "Fit", "Fitted", "Layer", "read_adapter"]
