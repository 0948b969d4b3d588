#pragma once
// Sums in global memory to which blocks add. Their layout ignores rows and columns: numbers of
// neighbouring threads are neighbours in memory.

// Returns the index, among a block's sums, of number e of a thread's n-th four numbers.
template <int threads>
inline int place_of_sum(int n, int e) {
  return (n * threads + int(threadIdx.x)) * 4 + e;
}

// Adds to a thread's n-th four numbers.
template <int threads, class T>
inline void add_four(T* sums, int n, const T (&more)[4]) {
  for (int e = 0; e < 4; ++e) atomicAdd(sums + place_of_sum<threads>(n, e), more[e]);
}
