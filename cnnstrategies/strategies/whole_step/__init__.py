"""A strategy in which every rank runs the user's step once, with the whole global batch."""
