"""Our own engine for NVIDIA GPUs."""
