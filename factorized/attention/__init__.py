"""Attention: reading the families, their QK and OV forms, heads of other sizes."""
