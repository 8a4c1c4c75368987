"""Places arrays on the JAX engine: meshes, shardings, initial values and checkpoint leaves."""
