"""Commands that use a run after its training."""
