"""Products with quantized operands."""
