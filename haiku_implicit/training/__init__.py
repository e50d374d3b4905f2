"""Training of trees with implicit arrays: gradients, optimizers, and quantized optimizer states."""
