"""Tables, plots and the generated sections of pages."""
