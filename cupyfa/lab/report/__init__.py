"""Tables, plots and the generated parts of pages."""
