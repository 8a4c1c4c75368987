"""`tftpu launch tpu-vm`: slices of Cloud TPU VMs."""
