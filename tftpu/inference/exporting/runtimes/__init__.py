"""Programs that run an export by its own runtime, each in a process without tftpu."""
