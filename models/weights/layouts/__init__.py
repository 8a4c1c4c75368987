"""What other libraries call the weights of the zoo's models, and in what shape they keep them."""
