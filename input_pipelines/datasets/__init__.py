"""Data sets of each kind: pipelines built from their options."""
