"""Haiku's side: wrapped models, and implicit arrays put into their parameters."""
