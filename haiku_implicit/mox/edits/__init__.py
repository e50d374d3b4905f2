"""Changes of a module expression."""
