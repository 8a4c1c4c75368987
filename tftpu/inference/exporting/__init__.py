"""Trained models for other programs: their formats, and the proof that they are the same."""
