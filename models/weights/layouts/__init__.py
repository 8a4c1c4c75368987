"""The names and shapes that other libraries give to the weights of the zoo's models."""
