"""Those who guess: draft heads, smaller models, and lookup in the text itself."""
