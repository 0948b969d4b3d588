"""The steps of a call from the arguments of a public function to a launch."""
