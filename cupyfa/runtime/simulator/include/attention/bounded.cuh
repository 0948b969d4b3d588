#pragma once
// An index computed by a user's expression. The simulator reports an index that is out of range.

#include <simulator.h>

extern "C" int snprintf(char* text, size_t bytes, const char* format, ...);

template <class T>
struct Bounded {
  T index;
  const char* array;  // the array's name and the expression
  simulator::Here here;

  T within(int size) const {
    if (index >= 0 && index < size) return index;
    char text[200];
    snprintf(text, sizeof text, "reads index %lld of an axis of size %d of %s", (long long)index,
             size, array);
    simulator::fault(text, here);
  }
};

inline Bounded<int> bounded(int index, const char* array,
                            simulator::Here here = simulator::Here()) {
  return {index, array, here};
}
inline Bounded<long long> bounded(long long index, const char* array,
                                  simulator::Here here = simulator::Here()) {
  return {index, array, here};
}
inline Bounded<__int128> bounded(__int128 index, const char* array,
                                 simulator::Here here = simulator::Here()) {
  return {index, array, here};
}
