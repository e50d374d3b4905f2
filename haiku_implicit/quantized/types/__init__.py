"""Types whose weights are quantized, and the rules of quantized matrices."""
