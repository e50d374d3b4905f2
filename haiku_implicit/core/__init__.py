"""Implicit arrays and the interpreter that runs jaxprs on them, without any concrete type."""
