"""Launchers: TPU VMs, Vertex AI and Kubernetes Engine."""
