"""The objectives of a step: losses, metrics, and the sums that they are computed from."""
