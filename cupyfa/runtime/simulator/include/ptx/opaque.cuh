#pragma once
// Against registers that fill up with what is rarely needed. Here there are no such registers.

// The same number.
template <class T>
inline T opaque(T value) {
  return value;
}
