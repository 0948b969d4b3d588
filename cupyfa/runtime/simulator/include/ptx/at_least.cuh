#pragma once
// Comparisons of both halves of a register at a time.

// All bits of the halves of x that are not below those of y.
inline unsigned halves_at_least(unsigned x, unsigned y) {
  const unsigned lower = (x & 0xffff) >= (y & 0xffff), upper = x >> 16 >= y >> 16;
  return lower * 0xffff | upper * 0xffff0000;
}
