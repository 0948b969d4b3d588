// begin_ragged: prepares the outputs of a ragged batch, and the counter of its tiles.
//
// Fills the rows of O and lse that are unused or belong to no sequence, as clear_rest does: O
// becomes 0 and lse -infinity. Sets the number of tiles that blocks have taken to 0.
//
//   O [batch, heads, rows, width]    lse [batch, heads, rows]    taken [1]
//   grid (max(cdiv(rows, threads), 1) * heads * batch)    block (threads): one thread per row
//   the host sets: result, real, of_keys, width, threads, shared_bytes
#include <forward/parts/rest_rows.cuh>
#include <ptx/dependent_launch.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "uses no shared memory");

extern "C" __global__ __launch_bounds__(threads) void begin_ragged(Tensor<result> O,
                                                                   Tensor<real> lse, int* taken,
                                                                   int rows, int heads, Mods mods) {
  launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *taken = 0;
  const auto [tile, head, batch] = place(blockIdx.x, max(cdiv(rows, threads), 1), heads);
  const int row = tile * threads + threadIdx.x;
  if (row >= rows || is_used(mods, batch, row, rows)) return;
  for (int col = 0; col < width; ++col) O.row(batch, head, row)[col] = result(0);
  *lse.row(batch, head, row) = -infinity;
}
