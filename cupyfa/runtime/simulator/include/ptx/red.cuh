#pragma once
// Atomic sums in global memory. Their layout ignores rows and columns: neighbouring threads of a
// warp add to neighbouring floats.

// Returns the index, among a block's sums, of element e of a thread's n-th group of four.
template <int threads>
inline int place_of_sum(int n, int e) {
  return (n * threads + int(threadIdx.x)) * 4 + e;
}

// Adds four values to a thread's n-th group of sums.
template <int threads, class T>
inline void add_four(T* sums, int n, const T (&more)[4]) {
  for (int e = 0; e < 4; ++e) atomicAdd(sums + place_of_sum<threads>(n, e), more[e]);
}
