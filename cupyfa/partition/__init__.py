"""Functions that all calls on parts of a problem share, wherever the parts are computed."""
