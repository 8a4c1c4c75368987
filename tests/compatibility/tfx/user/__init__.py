"""Modules that a user of TFX writes."""
