"""Text to token ids and back: tokenizers, chat templates, streams of text."""
