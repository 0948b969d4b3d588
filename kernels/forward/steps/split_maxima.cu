// split_maxima: finds the largest finite magnitude in each column of K and V.
//
// The keys of a head are divided among `slabs` blocks. Each block writes one line of a
// table, and readers take the maximum of all lines, so neither clearing nor atomics are needed. The
// last element of a line is 1 if the slab has NaN or infinity, and 0 otherwise. column_bits, in
// which split_operands and split_gradient set bits, is cleared.
//
//   K, V [batch, kv_heads, N, d | dv]    maxima [batch, kv_heads, slabs, d + dv + 1]
//   column_bits: see column_bits.cuh
//   grid (slabs * kv_heads * batch)    block (threads)
//   the host sets: scalar, real, slabs, sets_bits, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/extent.cuh>
#include <forward/parts/split_f32/column_bits.cuh>
#include <tile/share_out_rows.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

struct Shared {
  float largest[threads];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

// Writes the maxima of `cols` columns over rows first_row … end - 1 of a head. Returns whether the
// thread has found NaN or infinity.
template <int cols>
__device__ bool write_maxima(Tensor<const scalar> X, int batch, int head, int first_row, int end,
                             Shared& shared, float* maxima) {
  constexpr int columns = power_of_two(cols), rows = threads / columns;
  static_assert(rows > 0, "a block has at least one thread per column");
  const int col = threadIdx.x % columns;
  float largest = 0;
  bool finite = true;
  if (col < cols) {
#pragma unroll 8
    for (int row = first_row + threadIdx.x / columns; row < end; row += rows) {
      const float x = fabs(X.row(batch, head, row)[col]);
      finite &= x < infinity;
      largest = fmax(largest, x < infinity ? x : 0.0f);
    }
  }
  __syncthreads();  // before the previous array's maxima are overwritten
  shared.largest[threadIdx.x] = largest;
  __syncthreads();
  if (threadIdx.x < cols) {
    for (int i = 1; i < rows; ++i)
      largest = fmax(largest, shared.largest[threadIdx.x + i * columns]);
    maxima[threadIdx.x] = largest;
  }
  return !finite;
}

extern "C" __global__ __launch_bounds__(threads) void split_maxima(
    Tensor<const scalar> K, Tensor<const scalar> V, float* maxima, unsigned* column_bits,
    Sizes sizes, int kv_heads, int group, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [slab, head, batch] = place(blockIdx.x, slabs, kv_heads);
  if (sets_bits && slab == 0) {
    unsigned* own = column_words(column_bits, (long long)batch * kv_heads + head, group, 0);
    for (int i = threadIdx.x; i < (1 + 2 * group) * warp_size; i += threads) own[i] = 0;
  }
  const int N = extent_of(sizes, mods, batch).N, size = cdiv(N, slabs);
  const int first = min(slab * size, N), end = min(first + size, N);
  float* line = maxima + (long long)blockIdx.x * (d + dv + 1);
  bool special = write_maxima<d>(K, batch, head, first, end, shared, line);
  special |= write_maxima<dv>(V, batch, head, first, end, shared, line + d);
  special = __syncthreads_or(special);
  if (threadIdx.x == 0) line[d + dv] = special ? 1.0f : 0.0f;
}
