"""The trainer, the session of one call of `fit`, and its reporting."""
