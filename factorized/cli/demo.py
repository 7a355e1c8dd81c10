"""stub."""
EXAMPLES = ""
def demo() -> None:
    """Stub."""
