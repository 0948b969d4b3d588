"""Tables, plots, and generated sections of documentation pages."""
