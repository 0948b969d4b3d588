#pragma once
// An index computed by a user's expression, which may lie outside its axis. Devices clamp it, so no
// kernel reads outside an array. The simulator's version of this header reports it as a fault.

template <class T>
struct Bounded {
  T index;

  __device__ __forceinline__ T within(int size) const { return max(T(0), min(index, T(size - 1))); }
};
// __int128 lacks min() and max().
template <>
struct Bounded<__int128> {
  __int128 index;

  __device__ __forceinline__ long long within(int size) const {
    const __int128 most = size - 1, not_above = index < most ? index : most;
    return not_above < 0 ? 0 : (long long)(not_above);
  }
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
