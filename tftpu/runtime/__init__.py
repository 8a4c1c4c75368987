"""A run's process: hosts, preemption, watchdog and the account of its time."""
