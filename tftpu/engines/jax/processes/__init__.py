"""The processes of the JAX engine: connects them, exchanges texts, and notices lost hosts."""
