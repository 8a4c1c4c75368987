"""The command line, the experiments, and the ways to where TPUs are."""
