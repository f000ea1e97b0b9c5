"""Everything around the notebook, in rooms: see the one-line docstring of each folder."""
