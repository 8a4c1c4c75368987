"""Prices a compiled program: time of instructions, collectives and host copies; cost of a step."""
