"""A model as a tree of calls and equations, and how it runs."""
