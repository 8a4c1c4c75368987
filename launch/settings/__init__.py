"""From the command line to typed options: flags, configs, values, and users' own code."""
