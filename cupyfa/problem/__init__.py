"""Description of a call: dtypes, options, optional inputs, sequence lengths and the Problem."""
