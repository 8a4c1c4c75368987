"""Conversion of any source to TFRecord shards."""
