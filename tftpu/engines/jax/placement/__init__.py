"""The places of arrays on the JAX engine: meshes, shardings, initial values, checkpoint leaves."""
