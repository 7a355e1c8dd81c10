"""The version of the package, stamped into every checkpoint."""

__version__ = "0.1.0"
