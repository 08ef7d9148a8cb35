"""From launches of a plan to instructions of a program, and the judge of what came of it."""
