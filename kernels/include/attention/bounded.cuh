#pragma once
// An index that the user's expression computes, and that may leave its axis. On a device it is
// clamped, so that no kernel reads outside an array; the simulator's header of this name reports
// it, with the array and the expression.

template <class T>
struct Bounded {
  T index;

  __device__ __forceinline__ T within(int size) const { return max(T(0), min(index, T(size - 1))); }
};
// min and max are not declared for this type.
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
