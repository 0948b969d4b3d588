"""Turns a public function's arguments into kernel launches."""
