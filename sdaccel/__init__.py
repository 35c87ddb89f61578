"""sdaccel: Stable Diffusion through engines that stay open to look into."""

__version__ = "0.1.0.dev0"
