"""Data sets of each kind: from their options to pipelines."""
