"""What is trained of a tree of implicit arrays: gradients, optimizers, and their states in few bits."""
