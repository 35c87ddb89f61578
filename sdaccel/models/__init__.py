"""What a Stable Diffusion model is: families, checkpoints, published configs."""

from sdaccel.models.checkpoint import Checkpoint, Component, TensorRef, open_checkpoint, read_header
from sdaccel.models.family import Family

__all__ = ["Checkpoint", "Component", "Family", "TensorRef", "open_checkpoint", "read_header"]
