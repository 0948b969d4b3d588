// clear_rest: fills the rows of a packed array that belong to no sequence, or are not used.
//
// O and gradients get 0, and lse gets -infinity, as rows that see no key do.
//
//   X [heads, rows, width]
//   grid (max(cdiv(rows, threads), 1) * heads)    block (threads), a thread for each row
//   the host sets: scalar, real, of_keys, of_sums, width, threads, shared_bytes
#include <attention/ragged.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "nothing is shared");

template <bool sums>
struct Element {
  using Type = scalar;
};
template <>
struct Element<true> {
  using Type = real;
};
using Own = Element<of_sums>::Type;

// Whether a row is one that the launches before have written.
template <class Arrays>
__device__ __forceinline__ bool is_used(const Arrays& mods, int row, int rows) {
  const auto span = [&](int sequence) {
    if constexpr (of_keys)
      return used_keys(mods, sequence, rows);
    else
      return used_queries(mods, sequence, rows);
  };
  const int* offsets = of_keys ? mods.cu_seqlens_k_.data : mods.cu_seqlens_q_.data;
  int sequence = 0, last = mods.cu_seqlens_q_.size[0] - 2;
  while (sequence < last) {
    const int middle = (sequence + last + 1) / 2;
    if (offsets[middle] <= row)
      sequence = middle;
    else
      last = middle - 1;
  }
  const PackedRows own = span(sequence);
  return row >= own.first && row < own.first + own.count;
}

extern "C" __global__ __launch_bounds__(threads) void clear_rest(Tensor<Own> X, int rows, int heads,
                                                                 Mods mods) {
  const auto [tile, head, batch] = place(blockIdx.x, max(cdiv(rows, threads), 1), heads);
  const int row = tile * threads + threadIdx.x;
  if (row >= rows || is_used(mods, row, rows)) return;
  for (int col = 0; col < width; ++col)
    X.row(batch, head, row)[col] = Own(of_sums ? -infinity : real(0));
}
