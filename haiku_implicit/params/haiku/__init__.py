"""Haiku's transformed functions, creators and getters."""
