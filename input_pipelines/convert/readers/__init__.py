"""Readers of `tftpu data convert`: one module for each kind of source."""
