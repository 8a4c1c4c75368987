"""Launchers: TPU VMs and Vertex AI."""
