"""RollArt: multi-task agentic reinforcement learning on disaggregated hardware."""

__version__ = "0.1.0"
