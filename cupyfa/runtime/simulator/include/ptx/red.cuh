#pragma once
// Sums in global memory that blocks add to, in an order of their own: a thread's numbers lie where
// those of its neighbours follow them, whatever rows and columns they are of.

// Where number e of a thread's n-th four numbers is, among the sums of a block.
template <int threads>
inline int place_of_sum(int n, int e) {
  return (n * threads + int(threadIdx.x)) * 4 + e;
}

// Adds to a thread's n-th four.
template <int threads, class T>
inline void add_four(T* sums, int n, const T (&more)[4]) {
  for (int e = 0; e < 4; ++e) atomicAdd(sums + place_of_sum<threads>(n, e), more[e]);
}
