// fa2_tangent: attention and its directional derivative in one pass over the keys.
//
// A direction moves Q, K and V by the tangents Q_dot, K_dot and V_dot. With P = softmax(S), and
// slope the derivative of the expressions that modify scores:
//
//   S_dot = slope * scale * (Q_dot K^T + Q K_dot^T)
//   lse_dot = rowsum(P S_dot)    O_dot = (P S_dot) V + P V_dot - lse_dot * O
//
// Where arrays of expressions move, S_dot has the derivative along their tangents as another term,
// and where a sink moves, lse_dot has that of the sink's weight (array_tangents.cuh).
//
// All sums over keys have the weights of `fa2`, exp(S - maximum), so a block accumulates them
// beside O and rescales them by the same factor when the maximum rises.
//
// Several directions share S and P. A tangent that is 0 is neither loaded nor multiplied.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q_dot, K_dot, V_dot, O_dot, lse_dot: like these, with directions * batch in place of batch
//   grid (cdiv(M, Br) * heads * batch)    block (Br): one thread per row of the tile of Q
//   the host sets: scalar, result, real, Br, Bc, d, dv, directions, moves_q, moves_k, moves_v,
//   moves_arrays, threads, shared_bytes and options (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <tangent/parts/array_tangents.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

constexpr int products = moves_arrays ? Bc : 0;  // rows of scaled products that a block keeps

struct Shared {
  real O[Br][dv];
  real O_dot[directions][Br][dv];  // sums of (P S_dot) V + P V_dot
  // Transposed: neighbouring threads' elements lie in neighbouring banks.
  real P[Bc][Br], P_slope[Bc][Br];  // S and slope at first
  real P_S_dot[Bc + products][Br];  // of one direction at a time; then products q·k
  scalar Q[Br][d], Q_dot[directions][Br][d];
  scalar K[Bc][d], K_dot[Bc][d];
  scalar V[Bc][dv], V_dot[Bc][dv];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == Br, "one thread per row of the Q tile");

// Number of scores, and of columns of O, that a thread accumulates in registers at a time.
constexpr int keys_together = Bc < 16 ? Bc : 16;
constexpr int cols_together = dv < 32 ? dv : 32;
static_assert(Bc % keys_together == 0, "a tile has whole groups of keys");

// A thread's row and a tile of keys.
struct Keys {
  Extent extent;
  int row, first;

  __device__ bool sees(int key) const { return extent.sees(row, first + key); }
  __device__ real dropped(real p, int key) const { return extent.dropped(p, row, first + key); }
};

// Loads a row of a tile; writes zeros if the row lies past the end of the tensor.
template <int width>
__device__ void load_row(scalar (&tile)[width], Tensor<const scalar> from, int batch, int head,
                         int row, int rows) {
  for (int col = 0; col < width; ++col)
    tile[col] = row < rows ? from.row(batch, head, row)[col] : scalar(real(0));
}

// Adds products of a row of Q and some rows of K to `dots`.
__device__ void multiply(const scalar (&q)[d], const scalar (*K)[d], real (&dots)[keys_together]) {
  const timeline::Phase phase(timeline::arithmetic, keys_together * d);
#pragma unroll 4
  for (int k = 0; k < d; ++k) {
#pragma unroll
    for (int i = 0; i < keys_together; ++i) dots[i] += real(q[k]) * real(K[i][k]);
  }
}

// Computes this thread's row of S, -infinity for hidden keys, and the slopes; returns the maximum.
__device__ real scores(Shared& shared, const Keys& keys, const Scorer<real>& scorer) {
  const Extent& extent = keys.extent;
  real largest = -infinity;
  for (int first = 0; first < Bc; first += keys_together) {
    real dots[keys_together] = {};
    multiply(shared.Q[threadIdx.x], &shared.K[first], dots);
#pragma unroll
    for (int i = 0; i < keys_together; ++i) {
      const auto [score, slope] =
          scorer.with_slope(dots[i], extent, index_of<true>(keys.row, 0, extent.M),
                            index_of<true>(keys.first + first + i, 0, extent.N));
      const real visible = keys.sees(first + i) ? score : real(-infinity);
      if (moves_arrays) shared.P_S_dot[products + first + i][threadIdx.x] = dots[i] * scorer.scale;
      shared.P[first + i][threadIdx.x] = visible;
      shared.P_slope[first + i][threadIdx.x] = slope;
      largest = fmax(largest, visible);
    }
  }
  return largest;
}

// Turns this thread's row of S into P = exp(S - maximum); returns its sum, before dropout.
__device__ real exponentiate(Shared& shared, const Keys& keys, const OnlineSoftmax& softmax,
                             const ArrayTangents<moves_arrays>& tangents) {
  const timeline::Phase phase(timeline::softmax, Bc);
  real sum = 0;
  for (int key = 0; key < Bc; ++key) {
    if (!keys.sees(key)) continue;
    const real p = softmax.p(shared.P[key][threadIdx.x]);
    real& slope = shared.P_slope[key][threadIdx.x];
    slope = tangents.kept(p, slope);
    shared.P[key][threadIdx.x] = keys.dropped(p, key);
    sum += p;
  }
  return sum;
}

// Computes this thread's row of P S_dot in one direction; returns its sum, before dropout.
__device__ real move_scores(Shared& shared, const Keys& keys, int direction, real scale,
                            const ArrayTangents<moves_arrays>& tangents) {
  real sum = 0;
  for (int first = 0; first < Bc; first += keys_together) {
    real dots[keys_together] = {};
    if (moves_q) multiply(shared.Q_dot[direction][threadIdx.x], &shared.K[first], dots);
    if (moves_k) multiply(shared.Q[threadIdx.x], &shared.K_dot[first], dots);
#pragma unroll
    for (int i = 0; i < keys_together; ++i) {
      const int key = first + i;
      if (!keys.sees(key)) continue;
      const real moved = tangents.moved(
          keys.extent, direction, keys.row, keys.first + key, shared.P_slope[key][threadIdx.x],
          shared.P_S_dot[products + key][threadIdx.x], dots[i] * scale);
      shared.P_S_dot[key][threadIdx.x] = keys.dropped(moved, key);
      sum += moved;
    }
  }
  return sum;
}

// Computes a row: sums = sums * factor + the terms of the visible keys. Terms are summed separately
// first, because small numbers lose bits in a large sum.
template <class Term>
__device__ void accumulate(real (&sums)[dv], const Keys& keys, real factor, Term term) {
  const timeline::Phase phase(timeline::arithmetic, Bc * dv);
  for (int first = 0; first < dv; first += cols_together) {
    real of_tile[cols_together] = {};
#pragma unroll 4
    for (int key = 0; key < Bc; ++key) {
      if (!keys.sees(key)) continue;  // 0 * NaN is NaN
#pragma unroll
      for (int i = 0; i < cols_together; ++i)
        if (first + i < dv) of_tile[i] += term(key, first + i);
    }
#pragma unroll
    for (int i = 0; i < cols_together; ++i)
      if (first + i < dv) sums[first + i] = sums[first + i] * factor + of_tile[i];
  }
}

extern "C" __global__ __launch_bounds__(threads) void fa2_tangent(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V,
    Tensor<const scalar> Q_dot, Tensor<const scalar> K_dot, Tensor<const scalar> V_dot,
    Tensor<result> O, Tensor<real> lse, Tensor<result> O_dot, Tensor<real> lse_dot, Sizes sizes,
    int heads, int batches, int group, real scale, Mods mods,
    ArrayTangents<moves_arrays> tangents) {
  Shared& shared = shared_memory<Shared>();
  const Scorer<real> scorer = {scale, mods};
  const auto [tile, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const Extent extent = extent_of(sizes, mods, batch, head);
  if (!extent.has_tile_of_rows(tile * Br)) return;
  const int lane = threadIdx.x, M = extent.M, N = extent.N, row = tile * Br + lane;
  const int kv_head = head / group;
  const auto keys_of_tile = row_tile<Br, Bc>(extent, tile * Br, head, batch);

  load_row(shared.Q[lane], Q, batch, head, row, M);  // only this thread reads the row
  for (int col = 0; col < dv; ++col) shared.O[lane][col] = 0;
  for (int r = 0; r < directions; ++r) {
    if (moves_q) load_row(shared.Q_dot[r][lane], Q_dot, r * batches + batch, head, row, M);
    for (int col = 0; col < dv; ++col) shared.O_dot[r][lane][col] = 0;
  }
  OnlineSoftmax softmax;
  softmax.begin_with(extent.sink());
  real sum_dot[directions];  // of P S_dot
  for (int r = 0; r < directions; ++r) sum_dot[r] = tangents.of_sink(r, batch, head, extent.sink());

  for (int first_key = keys_of_tile.kv_begin; first_key < keys_of_tile.kv_end;
       first_key = keys_of_tile.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, tile * Br);
    const Keys keys = {extent, row, first_key};
    real factor = 1;
#pragma unroll
    for (int r = 0; r < directions; ++r) {
      const int its = r * batches + batch;
      __syncthreads();  // before this tile overwrites keys that a slower thread still reads
      for (int key = lane; key < Bc; key += threads) {
        if (r == 0) load_row(shared.K[key], K, batch, kv_head, first_key + key, N);
        if (r == 0) load_row(shared.V[key], V, batch, kv_head, first_key + key, N);
        if (moves_k) load_row(shared.K_dot[key], K_dot, its, kv_head, first_key + key, N);
        if (moves_v) load_row(shared.V_dot[key], V_dot, its, kv_head, first_key + key, N);
      }
      __syncthreads();  // keys and values have arrived
      if (r == 0) {
        factor = softmax.raise(scores(shared, keys, scorer));
        softmax.sum += exponentiate(shared, keys, softmax, tangents);
        accumulate(shared.O[lane], keys, factor, [&](int key, int col) {
          return shared.P[key][lane] * real(shared.V[key][col]);
        });
      }
      sum_dot[r] = sum_dot[r] * factor + move_scores(shared, keys, r, scale, tangents);
      accumulate(shared.O_dot[r][lane], keys, factor, [&](int key, int col) {
        const real moved = shared.P_S_dot[key][lane] * real(shared.V[key][col]);
        return moves_v ? moved + shared.P[key][lane] * real(shared.V_dot[key][col]) : moved;
      });
    }
  }

  const timeline::Phase phase(timeline::epilogue);
  if (row >= M) return;
  const real inverse_sum = softmax.inverse_sum();
  *lse.row(batch, head, row) = softmax.lse();
  for (int col = 0; col < dv; ++col)
    O.row(batch, head, row)[col] = result(shared.O[lane][col] *= inverse_sum);
  for (int r = 0; r < directions; ++r) {
    const real moved = sum_dot[r] * inverse_sum;
    *lse_dot.row(r * batches + batch, head, row) = moved;
    for (int col = 0; col < dv; ++col) {
      const real o = shared.O[lane][col];
      // Where O or lse_dot is infinite, the derivative does not exist: infinity - infinity is NaN.
      const real nan = (o - o) + (moved - moved);
      O_dot.row(r * batches + batch, head, row)[col] =
          result(shared.O_dot[r][lane][col] * inverse_sum - moved * o + nan);
    }
  }
}
