"""What calls on parts of a problem have in common, wherever the parts are computed."""
