"""JAX's transformations that find mapped axes and static arguments themselves."""
