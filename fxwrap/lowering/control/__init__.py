"""Control flow, side effects, collectives and streams."""
