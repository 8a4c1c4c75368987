"""Draws a report as one page that a browser shows without a network."""
