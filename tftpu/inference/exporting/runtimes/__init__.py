"""Programs that run an export in its own runtime, each in a process without tftpu."""
