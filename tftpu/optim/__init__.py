"""Optimizers, learning-rate schedules, losses, metrics and precision."""
