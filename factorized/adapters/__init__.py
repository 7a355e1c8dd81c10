"""Where attention modules keep their matrices: one small adapter per family, looked up by class."""
