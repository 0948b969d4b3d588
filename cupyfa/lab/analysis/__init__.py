"""What kernels cost: memory, roofline, resources, profiles; and whether the installation works."""
