"""Tests of the commands that check a config or a machine."""
