"""The model families of the zoo, one file each."""
