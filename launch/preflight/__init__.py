"""Preflight of an experiment: the check, its reports, and the choice of a mesh."""
