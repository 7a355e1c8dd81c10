"""The paper's results: summaries, charts and reports."""
