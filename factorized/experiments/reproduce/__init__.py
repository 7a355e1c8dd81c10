"""The paper's results: how they are summed up and shown."""
