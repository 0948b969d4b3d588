// fa2_tangent: attention and its directional derivative in one pass over the keys.
//
// A direction moves Q, K and V by the tangents Q_dot, K_dot and V_dot. With P = softmax(S), and
// slope the derivative of the expressions that modify scores:
//
//   S_dot = slope * scale * (Q_dot K^T + Q K_dot^T)
//   lse_dot = rowsum(P S_dot)    O_dot = (P S_dot) V + P V_dot - lse_dot * O
//
// All sums over keys have the weights of `fa2`, exp(S - maximum), so a block accumulates them
// beside O and rescales them by the same factor when the maximum rises.
//
//   Q, Q_dot, O, O_dot [batch, heads, M, d | dv]    K, K_dot, V, V_dot [batch, kv_heads, N, d | dv]
//   lse, lse_dot [batch, heads, M]
//   grid (any size; blocks loop over cdiv(M, Br) * heads * batch tiles of Q)    block (Br)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <forward/parts/seen_keys.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

struct Shared {
  real O[Br][dv];
  real O_dot[Br][dv];  // sums of (P S_dot) V + P V_dot
  real S[Bc][Br];      // transposed: neighbouring threads' elements lie in neighbouring banks
  real S_dot[Bc][Br];
  scalar Q[Br][d], Q_dot[Br][d];
  scalar K[Bc][d], K_dot[Bc][d];
  scalar V[Bc][dv], V_dot[Bc][dv];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == Br, "one thread per row of the Q tile");

// Number of scores, and of columns of O, that a thread accumulates in registers at a time.
constexpr int keys_together = Bc < 16 ? Bc : 16;
constexpr int cols_together = 16;
static_assert(Bc % keys_together == 0, "a tile has whole groups of keys");

// Loads a row of a tile; writes zeros if the row lies past the end of the tensor.
template <int width>
__device__ void load_row(scalar (&tile)[width], Tensor<const scalar> from, int batch, int head,
                         int row, int rows) {
  for (int col = 0; col < width; ++col)
    tile[col] = row < rows ? from.row(batch, head, row)[col] : scalar(real(0));
}

// Computes this thread's rows of S and S_dot in groups of keys; returns the maximum of S over the
// visible keys.
__device__ real scores(Shared& shared, const Seen& seen, const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, 3 * Bc * d);
  real largest = -infinity;
  for (int first = seen.first / keys_together * keys_together; first < seen.end;
       first += keys_together) {
    real dots[keys_together] = {}, moved[keys_together] = {};
#pragma unroll 4
    for (int k = 0; k < d; ++k) {
      const real q = real(shared.Q[threadIdx.x][k]), q_dot = real(shared.Q_dot[threadIdx.x][k]);
#pragma unroll
      for (int i = 0; i < keys_together; ++i) {
        dots[i] += q * real(shared.K[first + i][k]);
        moved[i] += q_dot * real(shared.K[first + i][k]) + q * real(shared.K_dot[first + i][k]);
      }
    }
#pragma unroll
    for (int i = 0; i < keys_together; ++i) {
      const Extent& extent = seen.extent;
      const int key = seen.first_key + first + i;
      const auto [score, slope] = scorer.with_slope(
          dots[i], extent, index_of<true>(seen.row, 0, extent.M), index_of<true>(key, 0, extent.N));
      shared.S[first + i][threadIdx.x] = extent.shown(seen.row, key) ? score : real(-infinity);
      shared.S_dot[first + i][threadIdx.x] = moved[i] * scorer.scale * slope;
      if (first + i >= seen.first && first + i < seen.end)
        largest = fmax(largest, shared.S[first + i][threadIdx.x]);
    }
  }
  return largest;
}

// Turns this thread's row of S into P = exp(S - maximum), and S_dot into P S_dot. Adds P S_dot to
// `sum_dot` and returns the sum of P, both before dropout.
__device__ real exponentiate(Shared& shared, const Seen& seen, const OnlineSoftmax& softmax,
                             real& sum_dot) {
  const timeline::Phase phase(timeline::softmax, Bc);
  real sum = 0, sum_of_tile_dot = 0;  // small numbers lose bits in a large sum
  for (int key = seen.first; key < seen.end; ++key) {
    if (!seen.shows(key)) continue;  // P is 0, but S_dot may be NaN
    const real p = softmax.p(shared.S[key][threadIdx.x]);
    const real p_dot = score_gradient(p, shared.S_dot[key][threadIdx.x], real(1));
    shared.S[key][threadIdx.x] = seen.dropped(p, key);
    shared.S_dot[key][threadIdx.x] = seen.dropped(p_dot, key);
    sum += p;
    sum_of_tile_dot += p_dot;
  }
  sum_dot += sum_of_tile_dot;
  return sum;
}

// Computes `cols` columns of this thread's rows of O = O * factor + P V and of O_dot. Products of a
// tile are summed separately first, because small numbers lose bits in a large sum.
template <int cols>
__device__ void accumulate(Shared& shared, int first, const Seen& seen, real factor) {
  real sums[cols] = {}, moved[cols] = {};
#pragma unroll 4
  for (int key = seen.first; key < seen.end; ++key) {
    if (!seen.shows(key)) continue;  // 0 * NaN is NaN
    const real p = shared.S[key][threadIdx.x], p_dot = shared.S_dot[key][threadIdx.x];
#pragma unroll
    for (int i = 0; i < cols; ++i) {
      const real v = real(shared.V[key][first + i]);
      sums[i] += p * v;
      moved[i] += p_dot * v + p * real(shared.V_dot[key][first + i]);
    }
  }
#pragma unroll
  for (int i = 0; i < cols; ++i) {
    real &o = shared.O[threadIdx.x][first + i], &o_dot = shared.O_dot[threadIdx.x][first + i];
    o = o * factor + sums[i];
    o_dot = o_dot * factor + moved[i];
  }
}

__device__ void accumulate_row(Shared& shared, const Seen& seen, real factor) {
  const timeline::Phase phase(timeline::arithmetic, 3 * Bc * dv);
  for (int first = 0; first + cols_together <= dv; first += cols_together)
    accumulate<cols_together>(shared, first, seen, factor);
  constexpr int rest = dv % cols_together;
  if constexpr (rest > 0) accumulate<rest>(shared, dv - rest, seen, factor);
}

extern "C" __global__ __launch_bounds__(threads) void fa2_tangent(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V,
    Tensor<const scalar> Q_dot, Tensor<const scalar> K_dot, Tensor<const scalar> V_dot,
    Tensor<result> O, Tensor<real> lse, Tensor<result> O_dot, Tensor<real> lse_dot, Sizes sizes,
    int heads, int batches, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Scorer<real> scorer = {scale, mods};
  const unsigned all = unsigned(tiles_of_rows<Br>(sizes, mods)) * heads * batches;

  for (unsigned index = blockIdx.x; index < all; index += gridDim.x) {  // may exceed 2^31
    const auto [tile, head, batch] = place_of_rows<Br>(index, sizes, mods, heads);
    const Extent extent = extent_of(sizes, mods, batch, head);
    if (!extent.has_tile_of_rows(tile * Br)) continue;
    const int M = extent.M, N = extent.N, row = tile * Br + threadIdx.x;
    const auto keys_of_tile = row_tile<Br, Bc>(extent, tile * Br, head, batch);

    timeline::event(timeline::loads);
    load_row(shared.Q[threadIdx.x], Q, batch, head, row, M);  // only this thread reads the row
    load_row(shared.Q_dot[threadIdx.x], Q_dot, batch, head, row, M);
    for (int col = 0; col < dv; ++col)
      shared.O[threadIdx.x][col] = shared.O_dot[threadIdx.x][col] = 0;
    timeline::end(timeline::loads);
    OnlineSoftmax softmax;
    softmax.begin_with(extent.sink());
    real sum_dot = 0;  // of P S_dot

    for (int first_key = keys_of_tile.kv_begin; first_key < keys_of_tile.kv_end;
         first_key = keys_of_tile.after<Bc>(first_key)) {
      timeline::event(timeline::tile, first_key, tile * Br);
      __syncthreads();  // before this tile overwrites keys that a slower thread still reads
      timeline::event(timeline::loads);
      for (int key = threadIdx.x; key < Bc; key += threads) {
        load_row(shared.K[key], K, batch, head / group, first_key + key, N);
        load_row(shared.V[key], V, batch, head / group, first_key + key, N);
        load_row(shared.K_dot[key], K_dot, batch, head / group, first_key + key, N);
        load_row(shared.V_dot[key], V_dot, batch, head / group, first_key + key, N);
      }
      timeline::end(timeline::loads);
      __syncthreads();  // keys, values and their tangents have arrived

      const Seen seen = seen_in_tile(extent, row, first_key, Bc);
      const real factor = softmax.raise(scores(shared, seen, scorer));
      sum_dot *= factor;
      softmax.sum += exponentiate(shared, seen, softmax, sum_dot);
      accumulate_row(shared, seen, factor);
    }

    const timeline::Phase phase(timeline::epilogue);
    if (row < M) {
      const real inverse_sum = softmax.inverse_sum(), moved = sum_dot * inverse_sum;
      for (int col = 0; col < dv; ++col) {
        const real o = shared.O[threadIdx.x][col] * inverse_sum;
        const real o_dot = shared.O_dot[threadIdx.x][col] * inverse_sum - moved * o;
        O.row(batch, head, row)[col] = result(o);
        // Where O or lse_dot is infinite, the derivative does not exist: infinity - infinity is
        // NaN.
        O_dot.row(batch, head, row)[col] = result(o_dot + (o - o) + (moved - moved));
      }
      *lse.row(batch, head, row) = softmax.lse();
      *lse_dot.row(batch, head, row) = moved;
    }
  }
}
