"""Cases, checks and the shrinking of what fails."""
