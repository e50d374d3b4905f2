"""JAX's own transformations with less to say: which axes are mapped, and which arguments are static."""
