"""From tokens to text: tokenizer, chat, samplers, the engine and its drafters."""
