"""A small model with the habits of AlphaFold 2."""
