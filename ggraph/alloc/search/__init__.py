"""The offline search for a smaller arena, imported when it is asked for."""
