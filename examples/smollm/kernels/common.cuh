// common: what all kernels of the example use. bfloat16 is a struct of its 16 bits, so no header of
// CUDA is needed.
using float32 = float;
struct bfloat16 {
  unsigned short bits;
};

__device__ inline float number(float x) {
  return x;
}
__device__ inline float number(bfloat16 x) {
  return __uint_as_float(x.bits << 16);
}

__device__ inline void store(float* to, float x) {
  *to = x;
}
__device__ inline void store(bfloat16* to, float x) {  // rounds to nearest, ties to even; keeps NaN
  const unsigned bits = __float_as_uint(x);
  to->bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ inline float warp_sum(float x) {
  for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffff, x, other);
  return x;
}

template <class T, int size>
struct alignas(size * sizeof(T)) Several {  // loaded at once
  T at[size];
};

// Programmatic dependent launch, if `early`: the next launch may start now, and this one waits here
// until the one before has ended. Only what no launch writes may be read before.
template <bool early>
__device__ void launch_dependents() {
  if constexpr (early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <bool early>
__device__ void prefetch(const char* line) {  // 128 bytes, to the L2 cache
  if constexpr (early) asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
template <bool early>
__device__ void wait_for_launch_before() {
  if constexpr (early) asm volatile("griddepcontrol.wait;" ::: "memory");
}
