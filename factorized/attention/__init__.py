"""Attention: reading the families of modules, their QK and OV forms, and heads of other sizes."""
