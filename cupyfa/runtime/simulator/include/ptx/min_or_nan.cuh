#pragma once
// The smaller of two floats, or NaN if one of them is.

inline float min_or_nan(float x, float y) {
  return x != x || x < y ? x : y;
}
