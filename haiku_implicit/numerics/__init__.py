"""Numbers in few bits: formats, scales and codes, and the matrix that is stored in them."""
