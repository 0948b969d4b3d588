#pragma once
// One row of O and lse, computed again, one score after the other.

#include <attention/score.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

// Whether a maximum, in powers of two, is too large for exponents relative to it.
__device__ __forceinline__ bool is_huge(float maximum) {
  return !(fabs(maximum) < float(1 << 26));
}

// One row of O and lse, computed by a warp from the keys that the query sees. Maxima are those of
// unscaled scores, so that exponents are right for scores of any size.
template <int d, int dv, class T, class Scores>
__device__ void repair_row(const T* q, Tensor<const T> K, Tensor<const T> V, scalar* out, real* lse,
                           const Extent& extent, int query, int batch, int kv_head,
                           const Scores& scorer) {
  constexpr int count =
      dv > 8 * warp_size ? 8 : cdiv(dv, warp_size);  // columns that a lane sums at a time
  const int lane = threadIdx.x % warp_size;
  const float scale2 = scorer.scale2();
  for (int first_col = lane; first_col < dv + lane; first_col += count * warp_size) {
    float maximum = -infinity, sum = 0, o[count] = {};
    for (int key = extent.kv_begin(query); key < extent.kv_end(query); ++key) {
      const T *k = K.row(batch, kv_head, key), *v = V.row(batch, kv_head, key);
      float product = 0;
      for (int j = lane; j < d; j += warp_size) product += float(q[j]) * float(k[j]);
      const float x = scorer.applied(warp_sum(product)), before = maximum;
      maximum = fmax(maximum, x);
      const float origin = maximum == -infinity ? 0.0f : maximum;
      const float factor = exp2f((before - origin) * scale2), p = exp2f((x - origin) * scale2);
      sum = sum * factor + p;
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const int col = first_col + j * warp_size;
        if (col < dv) o[j] = o[j] * factor + p * float(v[col]);
      }
    }
    const float inverse = sum == 0 ? 0.0f : 1 / sum;  // NaN of V stays NaN
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int col = first_col + j * warp_size;
      if (col < dv) out[col] = scalar(o[j] * inverse);
    }
    if (first_col == 0) *lse = maximum * (scale2 * ln2) + log(sum);
  }
}

// The same as a call, for kernels whose loops need the registers that an inlined one takes. (In a
// kernel with wgmma a call would serialize the products.)
template <int d, int dv, class T, class Scores>
__device__ __noinline__ void call_repair_row(const T* q, Tensor<const T> K, Tensor<const T> V,
                                             scalar* out, real* lse, const Extent& extent,
                                             int query, int batch, int kv_head,
                                             const Scores& scorer) {
  repair_row<d, dv>(q, K, V, out, lse, extent, query, batch, kv_head, scorer);
}
