// append_keys: writes the keys and values of new tokens into a KV cache before attention, and
// applies rotary embedding to the new keys and to the queries.
//
// Token i of a batch element has position p = lengths[batch] + shift + i. Rotary embedding rotates
// pairs of columns: x and x + `angles`, or 2 x and 2 x + 1 if `interleaved`. The cosine and sine of
// a pair's angle are in row p of two tables, or in row p + prefix_keys[batch] if the sequence has a
// prefix in another cache. All other columns are copied. (Su et al., 2021, arXiv:2104.09864,
// equation 34)
//
//   Q, turned_Q [batch, heads, tokens, d]: if `rotates`
//   new_K, new_V [batch, kv_heads, tokens, d | dv]: if `appends`
//   K, V [batch, kv_heads, capacity, d | dv], or in pages [pages, kv_heads, page_size, d | dv]
//   k_scale, v_scale [batch, kv_heads], or [pages, kv_heads] if k_scale_by_page, v_scale_by_page:
//   divisors of new rows, if K and V are e4m3 (`has_e4m3`)
//   cosines, sines [positions, angles]: if `rotates`
//   prefix_keys [batch]: number of keys before those in the cache, if `has_prefix`
//   lengths, used [batch]: number of keys before and, if `appends`, after appending
//   numbers [batch, most]: the page table, if page_size is not 0; nothing is written to pages
//   that do not exist
//   grid (cdiv(rows, threads / 32): one warp per row)    block (threads)
//   the host sets: scalar, operand, real, d, dv, threads, appends, rotates, interleaved, angles,
//   angles_of_sums, has_prefix, page_size, has_e4m3, k_scale_by_page, v_scale_by_page
#include <attention/kv_dtype.cuh>
#include <attention/pages.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/e4m3.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int pairs = angles > 0 ? angles : 1;
static_assert(2 * angles <= d, "a row has enough columns for all pairs");
static_assert(threads % warp_size == 0, "a warp writes a row");

template <bool of_sums>
struct AngleOf {
  using Type = scalar;
};
template <>
struct AngleOf<true> {
  using Type = real;
};
using Angle = AngleOf<angles_of_sums>::Type;

// Writes a row in the dtype of `to`; e4m3 elements are divided by `scale` first. All elements are
// loaded before the first is stored, because the compiler cannot move loads ahead of stores.
template <int cols, class T, class Number>
__device__ __forceinline__ void store_row(T* to, int lane, [[maybe_unused]] float scale,
                                          Number number) {
  constexpr int own = cdiv(cols, warp_size);
  scalar row[own];
#pragma unroll
  for (int i = 0; i < own; ++i)
    if (lane + i * warp_size < cols) row[i] = number(lane + i * warp_size);
#pragma unroll
  for (int i = 0; i < own; ++i) {
    const int col = lane + i * warp_size;
    if (col >= cols) break;
    if constexpr (sizeof(T) == 1)
      to[col] = {static_cast<unsigned char>(pack_e4m3(float(row[i]) / scale, 0, 0, 0))};
    else
      to[col] = row[i];
  }
}

// Returns the scale of a head in a page or batch element; 1 unless the cache is e4m3.
template <bool by_page>
__device__ __forceinline__ float scale_of(Tensor<const float> scales, int batch, int page,
                                          int head) {
  return has_e4m3 ? *scales.row(by_page ? page : batch, head, 0) : 1.0f;
}

struct Rotation {
  Tensor<const Angle> cosines, sines;
  int positions;

  // Returns an element of a row after rotation by the row's position.
  __device__ __forceinline__ scalar turned(const scalar* row, int col, int position) const {
    if (col >= 2 * angles) return row[col];
    const int pair = interleaved ? col / 2 : col % pairs;
    const int other = interleaved ? col ^ 1 : col < angles ? col + angles : col - angles;
    const int line = max(0, min(position, positions - 1));
    const real cosine = real(cosines.row(0, 0, line)[pair]),
               sine = real(sines.row(0, 0, line)[pair]);
    const real x = real(row[col]), y = real(row[other]);
    return scalar(col < other ? x * cosine - y * sine : x * cosine + y * sine);
  }
};

extern "C" __global__ __launch_bounds__(threads) void append_keys(
    Tensor<const scalar> Q, Tensor<scalar> turned_Q, Tensor<const scalar> new_K,
    Tensor<const scalar> new_V, Tensor<Stored> K, Tensor<Stored> V, Tensor<const Angle> cosines,
    Tensor<const Angle> sines, int positions, const int* lengths, int* used, const int* numbers,
    long long number_stride, int most, int page_count, int capacity, int shift, int tokens,
    int heads, int kv_heads, int batches, const int* prefix_keys, Tensor<const float> k_scale,
    Tensor<const float> v_scale) {
  const int own_heads = (appends ? 2 * kv_heads : 0) + (rotates ? heads : 0);
  const long long index = blockIdx.x * (long long)(threads / warp_size) + threadIdx.x / warp_size;
  const int token = int(index % tokens), unit = int(index / tokens % own_heads);
  const long long batch_of = index / tokens / own_heads;
  wait_for_launch_before();
  if (batch_of >= batches) return;
  const int batch = int(batch_of), lane = threadIdx.x % warp_size;
  const int before = max(0, min(lengths[batch], capacity));
  const int position = min(before + shift, capacity - token) + token;
  const Rotation rotation = {cosines, sines, positions};
  const int angle = position + (has_prefix ? max(0, min(prefix_keys[batch], positions)) : 0);

  if (appends && unit < 2 * kv_heads) {
    if (unit == 0 && token == 0 && lane == 0) used[batch] = min(before, capacity - tokens) + tokens;
    if (position < 0 || position >= capacity) return;
    int page = batch, row = position;
    if constexpr (page_size > 0) {
      const Pages own = {numbers + batch * number_stride, most, page_count};
      page = own.listed(position), row = position % page_rows;
      if (!own.has(page)) return;
    }
    if (unit < kv_heads) {
      const scalar* from = new_K.row(batch, unit, token);
      Stored* to = K.row(page, unit, row);
      const float scale = scale_of<k_scale_by_page>(k_scale, batch, page, unit);
      store_row<d>(to, lane, scale, [&](int col) {
        return rotates ? rotation.turned(from, col, angle) : from[col];
      });
    } else {
      const scalar* from = new_V.row(batch, unit - kv_heads, token);
      Stored* to = V.row(page, unit - kv_heads, row);
      const float scale = scale_of<v_scale_by_page>(v_scale, batch, page, unit - kv_heads);
      store_row<dv>(to, lane, scale, [&](int col) { return from[col]; });
    }
  } else {
    const int head = unit - (appends ? 2 * kv_heads : 0);
    const scalar* from = Q.row(batch, head, token);
    scalar* to = turned_Q.row(batch, head, token);
    store_row<d>(to, lane, 1, [&](int col) { return rotation.turned(from, col, angle); });
  }
}
