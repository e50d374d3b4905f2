"""Adapters in a tree of parameters: put on, taken apart, combined and merged."""
