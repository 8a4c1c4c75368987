"""Preflight of an experiment: its check, its reports, and the choice of a mesh."""
