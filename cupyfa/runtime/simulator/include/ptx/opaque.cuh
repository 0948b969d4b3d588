#pragma once
// Hides a value from the optimiser on a device; the simulator returns it unchanged.

template <class T>
inline T opaque(T value) {
  return value;
}
