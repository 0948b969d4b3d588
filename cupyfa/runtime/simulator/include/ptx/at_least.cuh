#pragma once
// Returns all ones in each half where x >= y, else zeros.

inline unsigned halves_at_least(unsigned x, unsigned y) {
  const unsigned lower = (x & 0xffff) >= (y & 0xffff), upper = x >> 16 >= y >> 16;
  return lower * 0xffff | upper * 0xffff0000;
}
