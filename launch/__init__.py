"""The command line, the configs, and the launchers for Google Cloud."""
