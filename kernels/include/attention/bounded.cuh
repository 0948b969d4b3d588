#pragma once
// An index that the user's text computes, and that may leave its axis. On a device it is clamped,
// so that no kernel reads outside an array; the simulator's header of this name reports it, with
// the array and the text.

template <class T>
struct Bounded {
  T index;

  __device__ __forceinline__ T within(int size) const { return max(T(0), min(index, T(size - 1))); }
};

__device__ __forceinline__ Bounded<int> bounded(int index, const char*) {
  return {index};
}
__device__ __forceinline__ Bounded<long long> bounded(long long index, const char*) {
  return {index};
}
__device__ __forceinline__ Bounded<__int128> bounded(__int128 index, const char*) {
  return {index};
}
