#pragma once
// An index that the user's text computes: outside its axis it is a fault.

#include <simulator.h>

extern "C" int snprintf(char* text, size_t bytes, const char* format, ...);

template <class T>
struct Bounded {
  T index;
  simulator::Here here;

  T within(int size) const {
    if (index >= 0 && index < size) return index;
    char text[100];
    snprintf(text, sizeof text, "reads index %lld of an axis of size %d of a captured array",
             (long long)index, size);
    simulator::fault(text, here);
  }
};

inline Bounded<int> bounded(int index, simulator::Here here = simulator::Here()) {
  return {index, here};
}
inline Bounded<long long> bounded(long long index, simulator::Here here = simulator::Here()) {
  return {index, here};
}
