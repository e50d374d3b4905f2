"""JAX's transformations with fewer arguments: mapped axes and static arguments are found."""
