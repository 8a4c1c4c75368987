"""The train step and the evaluation step of the JAX engine."""
