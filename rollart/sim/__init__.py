"""The simulated world: a clock that jumps, and one more set of adapters."""
