"""Planning: turns a problem and a kernel's record into launch parameters and source text."""
