// repair_rows: recomputes elements of the baseline's O where a masked V was not finite.
//
// A product of whole matrices multiplies the zeros of P at masked keys with V, and 0 * NaN and
// 0 * infinity are NaN. Elements of O that are NaN are recomputed over the visible keys only; all
// other elements stay unchanged.
//
//   P [batch, heads, M, N]    V [batch, kv_heads, N, dv]    O [batch, heads, M, dv]
//   grid (M * heads * batch)    block (threads)
//   the host sets: scalar, result, real, dv, threads, shared_bytes and options (extent.cuh)
#include <attention/extent.cuh>
#include <tile/tensor.cuh>

static_assert(shared_bytes == 0, "uses no shared memory");

extern "C" __global__ __launch_bounds__(threads) void repair_rows(Tensor<const scalar> P,
                                                                  Tensor<const scalar> V,
                                                                  Tensor<result> O, Sizes sizes,
                                                                  int heads, int group) {
  const auto [row, head, batch] = place(blockIdx.x, sizes.M, heads);
  const Extent extent = extent_of(sizes, batch);
  const scalar* p = P.row(batch, head, row);
  result* output = O.row(batch, head, row);

  for (int col = threadIdx.x; col < dv; col += threads) {
    if (!isnan(real(output[col]))) continue;
    real sum = 0;
    for (int key = extent.kv_begin(row); key < extent.kv_end(row); ++key) {
      sum += real(p[key]) * real(V.row(batch, head / group, key)[col]);
    }
    output[col] = result(sum);
  }
}
