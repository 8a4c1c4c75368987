"""Hyper-parameter search: the space, the study, its trials and its report."""
