// clear_rest: fills the rows of a ragged array that are unused or belong to no sequence.
//
// O, gradients and tangents become 0 and lse becomes -infinity, as in rows without visible keys.
// Operands become 0: weights of unused keys are 0, but 0 times a NaN in memory would be NaN.
//
//   X [batch, heads, rows, width]
//   grid (max(cdiv(rows, threads), 1) * heads * batch)    block (threads): one thread per row
//   the host sets: result, operand, real, of_keys, of_sums, of_lse, of_operands, width, threads,
//   shared_bytes
#include <forward/parts/rest_rows.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "uses no shared memory");

template <bool sums, bool operands>
struct Element {
  using Type = result;
};
template <>
struct Element<true, false> {
  using Type = real;
};
template <>
struct Element<false, true> {
  using Type = operand;
};
using Own = Element<of_sums, of_operands>::Type;

extern "C" __global__ __launch_bounds__(threads) void clear_rest(Tensor<Own> X, int rows, int heads,
                                                                 Mods mods) {
  wait_for_launch_before();
  launch_dependents();
  const auto [tile, head, batch] = place(blockIdx.x, max(cdiv(rows, threads), 1), heads);
  const int row = tile * threads + threadIdx.x;
  if (row >= rows || is_used(mods, batch, row, rows)) return;
  for (int col = 0; col < width; ++col)
    X.row(batch, head, row)[col] = Own(of_lse ? -infinity : real(0));
}
