#pragma once
// Keeps the compiler from holding rarely needed values in registers. The simulator has no need for
// that.

// Returns the same number.
template <class T>
inline T opaque(T value) {
  return value;
}
