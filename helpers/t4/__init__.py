"""The kernel for cards that are not here: cross-compiled, counted, its PTX run on the card that is."""
