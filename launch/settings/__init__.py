"""Turns the command line into typed options: flags, configs, values, and users' own code."""
