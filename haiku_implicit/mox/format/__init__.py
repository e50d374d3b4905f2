"""The JSON format of module expressions."""
