"""How numbers are held in few bits, and how to compute with them."""
