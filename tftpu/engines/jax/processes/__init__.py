"""The processes of the JAX engine: how they find each other, and what happens when one is lost."""
