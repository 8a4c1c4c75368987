"""Prices a compiled program: time by instruction, exchange, copies to the host, cost of a step."""
