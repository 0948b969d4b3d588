// fa2_coalesced: `fa2` with coalesced loads and stores.
//
// In `fa2` neighbouring threads load, and at the end store, addresses a whole row apart. Here the
// block copies one row at a time, and neighbouring threads copy neighbouring columns. The row sums
// go through shared memory, because the thread that stores an element of O does not own its row.
// Rows in shared memory are padded so that they begin in different banks. V overwrites K once the
// scores are computed, so that more blocks fit on a multiprocessor.
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
#include <tile/block_copy.cuh>
#include <tile/math.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

// Returns the smallest row length >= width, in elements, that is an odd multiple of 16 bytes. Eight
// threads that read 16 bytes each from eight consecutive rows then touch every bank exactly once.
template <class T>
__host__ __device__ constexpr int padded(int width) {
  constexpr int step = 16 / sizeof(T);
  return (cdiv(width, step) | 1) * step;
}

constexpr int KV_width = padded<scalar>(d > dv ? d : dv);

struct alignas(16) Shared {
  real O[Br][padded<real>(dv)];
  real S[Bc][Br];  // transposed: neighbouring threads' elements lie in neighbouring banks
  real inverse_sum[Br];
  alignas(16) scalar Q[Br][padded<scalar>(d)];
  scalar KV[Bc][KV_width];  // K, later overwritten by V
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == Br, "one thread per row of the Q tile");

// Number of scores, and of columns of O, that a thread accumulates in registers at a time. It reads
// each element of its row of Q or P once for all of them.
constexpr int keys_together = Bc < 16 ? Bc : 16;
constexpr int cols_together = 32;
static_assert(Bc % keys_together == 0, "a tile has whole groups of keys");

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
      for (int i = 0; i < keys_together; ++i) dots[i] += q * real(shared.KV[first + i][k]);
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
    for (int i = 0; i < cols; ++i) sums[i] += p * real(shared.KV[key][first + i]);
  }
#pragma unroll
  for (int i = 0; i < cols; ++i)
    shared.O[threadIdx.x][first + i] = shared.O[threadIdx.x][first + i] * factor + sums[i];
}

__device__ void accumulate_row(Shared& shared, const Seen& seen, real factor) {
  const timeline::Phase phase(timeline::arithmetic, Bc * dv);
  for (int first = 0; first + cols_together <= dv; first += cols_together) {
    accumulate<cols_together>(shared, first, seen, factor);
  }
  constexpr int rest = dv % cols_together;
  if constexpr (rest > 0) accumulate<rest>(shared, dv - rest, seen, factor);
}

extern "C" __global__ __launch_bounds__(threads) void fa2_coalesced(
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

    load_tile<threads, d>(shared.Q, Q, batch, head, tile * Br, M);
    for (int col = 0; col < dv; ++col) shared.O[threadIdx.x][col] = 0;
    OnlineSoftmax softmax;
    softmax.begin_with(extent.sink());

    for (int first_key = keys_of_tile.kv_begin; first_key < keys_of_tile.kv_end;
         first_key = keys_of_tile.after<Bc>(first_key)) {
      timeline::event(timeline::tile, first_key, tile * Br);
      __syncthreads();  // before K overwrites values that a slower thread still reads
      load_tile<threads, d>(shared.KV, rows_of(K, mods), batch, head / group, first_key, N);
      __syncthreads();  // K has arrived

      const Seen seen = seen_in_tile(extent, row, first_key, Bc);
      const real factor = softmax.raise(scores(shared, seen, scorer));
      softmax.sum += exponentiate(shared, seen, softmax);

      __syncthreads();  // before V overwrites keys that a slower thread still reads
      load_tile<threads, dv>(shared.KV, rows_of(V, mods), batch, head / group, first_key, N);
      __syncthreads();  // V has arrived
      accumulate_row(shared, seen, factor);
    }

    const timeline::Phase phase(timeline::epilogue);
    shared.inverse_sum[threadIdx.x] = softmax.inverse_sum();
    if (row < M) {
      *lse.row(batch, head, row) = softmax.lse();
      write_row_max(extent, row, softmax.row_max(0), softmax.sum);
    }
    __syncthreads();  // every row's output and sum are written
    for (int i = 0; i < min(Br, M - tile * Br); ++i) {
      for (int col = threadIdx.x; col < dv; col += threads) {
        O.row(batch, head, tile * Br + i)[col] = result(shared.O[i][col] * shared.inverse_sum[i]);
      }
    }
    __syncthreads();  // before the next tile of Q overwrites this one
  }
}
