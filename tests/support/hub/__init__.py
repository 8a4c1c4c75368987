"""Small models of KerasHub with random weights, and what they are trained on."""
