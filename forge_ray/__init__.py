"""ForgeRay trains agents by reinforcement learning inside the real programs they are deployed in."""

__version__ = "0.1.0"
