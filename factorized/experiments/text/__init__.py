"""Text: translation, masked and causal language models, questions about a text; trained by transformers."""
