"""Conversion of any data to TFRecord shards with a manifest, and its verification."""
