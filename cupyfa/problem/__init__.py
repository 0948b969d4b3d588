"""What one call computes: dtypes, options, optional inputs, lengths, problems."""
