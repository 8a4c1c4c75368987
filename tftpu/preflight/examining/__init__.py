"""Examines a model on slices: estimates, one step, and changes that would make it fit."""
