"""Where the JAX engine keeps each array: meshes, shardings, initial values, checkpoint leaves."""
