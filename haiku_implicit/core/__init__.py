"""Implicit arrays and the interpreter that runs jaxprs on them; knows no type."""
