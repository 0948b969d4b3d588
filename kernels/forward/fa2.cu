// fa2: the FlashAttention-2 algorithm, one block per tile of Q and one thread per row.
//
// The loops of `minimal` are interchanged: a block keeps its tile of Q and reads K and V once, so a
// row's output, maximum and sum never leave the block. Tiles of Q are independent, so the grid has
// one block per tile of Q instead of one per head. The output is divided by the sum once, at the
// end. Each thread computes several scores, and later several columns of O, at a time: it reads
// each element of Q or P once for all of them. (Dao, 2023, arXiv:2307.08691, algorithm 1)
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
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
  real S[Bc][Br];  // transposed: neighbouring threads' elements lie in neighbouring banks
  scalar Q[Br][d];
  scalar K[Bc][d];
  scalar V[Bc][dv];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == Br, "one thread per row of the Q tile");

// Number of scores, and of columns of O, that a thread accumulates in registers at a time. It reads
// each element of its row of Q or P once for all of them.
constexpr int keys_together = Bc < 16 ? Bc : 16;
constexpr int cols_together = 32;
static_assert(Bc % keys_together == 0, "a tile has whole groups of keys");

// Loads a row of a tile; writes zeros if the row lies past the end of the tensor.
template <int width, class Rows>
__device__ void load_row(scalar (&tile)[width], Rows from, int batch, int head, int row, int rows) {
  for (int col = 0; col < width; ++col) {
    tile[col] = row < rows ? from.row(batch, head, row)[col] : scalar(real(0));
  }
}

// Computes this thread's row of S in groups of keys; returns the maximum over the visible keys.
__device__ real scores(Shared& shared, const Seen& seen, const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, Bc * d);
  real largest = -infinity;
  for (int first = seen.first / keys_together * keys_together; first < seen.end;
       first += keys_together) {
    real dots[keys_together] = {};
#pragma unroll 4
    for (int k = 0; k < d; ++k) {
      const real q = real(shared.Q[threadIdx.x][k]);
#pragma unroll
      for (int i = 0; i < keys_together; ++i) dots[i] += q * real(shared.K[first + i][k]);
    }
#pragma unroll
    for (int i = 0; i < keys_together; ++i) {
      const real score = scorer(dots[i], seen.extent, seen.row, seen.first_key + first + i);
      shared.S[first + i][threadIdx.x] = score;
      if (first + i >= seen.first && first + i < seen.end) largest = fmax(largest, score);
    }
  }
  return largest;
}

// Turns this thread's row of S into P = exp(S - maximum); returns its sum, before dropout.
__device__ real exponentiate(Shared& shared, const Seen& seen, const OnlineSoftmax& softmax) {
  const timeline::Phase phase(timeline::softmax, Bc);
  real sum = 0;
  for (int key = seen.first; key < seen.end; ++key) {
    const real p = softmax.p(shared.S[key][threadIdx.x]);
    shared.S[key][threadIdx.x] = seen.dropped(p, key);
    sum += p;
  }
  return sum;
}

// Computes `cols` columns of this thread's row of O = O * factor + P V. P V is summed separately
// first, because small numbers lose bits in a large sum.
template <int cols>
__device__ void accumulate(Shared& shared, int first, const Seen& seen, real factor) {
  real sums[cols] = {};
#pragma unroll 4
  for (int key = seen.first; key < seen.end; ++key) {
    if (!seen.shows(key)) continue;  // 0 * NaN is NaN
    const real p = shared.S[key][threadIdx.x];
#pragma unroll
    for (int i = 0; i < cols; ++i) sums[i] += p * real(shared.V[key][first + i]);
  }
#pragma unroll
  for (int i = 0; i < cols; ++i)
    shared.O[threadIdx.x][first + i] = shared.O[threadIdx.x][first + i] * factor + sums[i];
}

__device__ void accumulate_row(Shared& shared, const Seen& seen, real factor) {
  const timeline::Phase phase(timeline::arithmetic, Bc * dv);
  for (int first = 0; first + cols_together <= dv; first += cols_together)
    accumulate<cols_together>(shared, first, seen, factor);
  constexpr int rest = dv % cols_together;
  if constexpr (rest > 0) accumulate<rest>(shared, dv - rest, seen, factor);
}

extern "C" __global__ __launch_bounds__(threads) void fa2(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<result> O,
    Tensor<real> lse, Sizes sizes, int heads, int batches, int group, real scale, Mods mods) {
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
    for (int col = 0; col < dv; ++col) shared.O[threadIdx.x][col] = 0;
    timeline::end(timeline::loads);
    OnlineSoftmax softmax;
    softmax.begin_with(extent.sink());

    for (int first_key = keys_of_tile.kv_begin; first_key < keys_of_tile.kv_end;
         first_key = keys_of_tile.after<Bc>(first_key)) {
      timeline::event(timeline::tile, first_key, tile * Br);
      __syncthreads();  // before this tile overwrites keys that a slower thread still reads
      timeline::event(timeline::loads);
      for (int key = threadIdx.x; key < Bc; key += threads) {
        load_row(shared.K[key], rows_of(K, mods), batch, head / group, first_key + key, N);
        load_row(shared.V[key], rows_of(V, mods), batch, head / group, first_key + key, N);
      }
      timeline::end(timeline::loads);
      __syncthreads();  // K and V have arrived

      const Seen seen = seen_in_tile(extent, row, first_key, Bc);
      const real factor = softmax.raise(scores(shared, seen, scorer));
      softmax.sum += exponentiate(shared, seen, softmax);
      accumulate_row(shared, seen, factor);
    }

    const timeline::Phase phase(timeline::epilogue);
    if (row < M) {
      for (int col = 0; col < dv; ++col) {
        O.row(batch, head, row)[col] = result(shared.O[threadIdx.x][col] * softmax.inverse_sum());
      }
      *lse.row(batch, head, row) = softmax.lse();
      write_row_max(extent, row, softmax.row_max(0), softmax.sum);
    }
  }
}
