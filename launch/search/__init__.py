"""Search for hyper-parameters: the space, the study, its trials and its report."""
