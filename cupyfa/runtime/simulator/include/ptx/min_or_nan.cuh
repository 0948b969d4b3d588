#pragma once
// Returns the smaller of two floats, or NaN if either is NaN.

inline float min_or_nan(float x, float y) {
  return x != x || x < y ? x : y;
}
