"""Checkpoints: manifests, shards and the copy in host memory."""
