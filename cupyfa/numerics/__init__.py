"""What is right, and how far from it a kernel may be."""
