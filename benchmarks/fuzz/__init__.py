"""Generated and mutated messages and bodies against a whole mesh, whose books are checked."""
