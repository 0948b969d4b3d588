"""From a problem and a kernel's record to a plan: numbers and source text."""
