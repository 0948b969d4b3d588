#pragma once
// Compares both 16-bit halves of a register at once.

// Sets all bits of each half where x is not below y.
inline unsigned halves_at_least(unsigned x, unsigned y) {
  const unsigned lower = (x & 0xffff) >= (y & 0xffff), upper = x >> 16 >= y >> 16;
  return lower * 0xffff | upper * 0xffff0000;
}
