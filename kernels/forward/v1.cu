// v1: the whole block works on one row of Q at a time.
//
// In `minimal` each thread reads a whole row, so neighbouring threads read addresses d elements
// apart. Here neighbouring threads read neighbouring columns, so every load is coalesced. In
// exchange, each dot product has to be reduced over the block.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum [batch, heads, M, dv], row_max, row_sum [batch, heads, M]: scratch
//   grid (heads * batch)    block (threads)
//   the host sets: scalar, result, real, Bc, d, dv, threads, shared_bytes and options (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/score.cuh>
#include <forward/parts/last_tile.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/block_copy.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int warps = threads / warp_size;

struct Shared {
  real partial[warps][Bc];
  scalar Q[d];
  scalar K[Bc][d];
  scalar V[Bc][dv];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads % warp_size == 0, "shuffles need whole warps");

// Computes the scores of the row in shared.Q for all keys of the tile; every thread gets all of
// them. Each warp reduces its share of the columns, then the warps' partial sums are added.
__device__ void scores(Shared& shared, real (&S)[Bc], const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, Bc * cdiv(d, threads));
  for (int key = 0; key < Bc; ++key) {
    real dot = 0;
    for (int k = threadIdx.x; k < d; k += threads)
      dot += real(shared.Q[k]) * real(shared.K[key][k]);
    dot = warp_sum(dot);
    if (threadIdx.x % warp_size == 0) shared.partial[threadIdx.x / warp_size][key] = dot;
  }
  __syncthreads();  // every warp's sums are written; Q and the row's old maximum are no longer read
  for (int key = 0; key < Bc; ++key) {
    real dot = 0;
    for (int warp = 0; warp < warps; ++warp) dot += shared.partial[warp][key];
    S[key] = scorer(dot);
  }
}

extern "C" __global__ __launch_bounds__(threads) void v1(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<result> O,
    Tensor<real> lse, Tensor<real> O_sum, Tensor<real> row_max, Tensor<real> row_sum, Sizes sizes,
    int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [_, head, batch] = place(blockIdx.x, 1, heads);
  const int kv_head = head / group;
  const Extent extent = extent_of(sizes, batch);
  const Scorer<real> scorer = {scale, mods};

  for (int tile = 0; tile <= last_tile(extent.N, Bc); ++tile) {
    const int first_key = tile * Bc;
    timeline::event(timeline::tile, first_key, 0);
    __syncthreads();  // before this tile overwrites keys that a slower thread still reads
    load_tile<threads, d>(shared.K, K, batch, kv_head, first_key, extent.N);
    load_tile<threads, dv>(shared.V, V, batch, kv_head, first_key, extent.N);

    for (int row = 0; row < extent.M; ++row) {
      const int kv_end = extent.kv_end(row);
      const int last = last_tile(kv_end, Bc);
      if (tile > last) continue;

      timeline::event(timeline::tile, first_key, row);
      timeline::event(timeline::loads, size_t(Q.data) / 16);
      for (int k = threadIdx.x; k < d; k += threads) shared.Q[k] = Q.row(batch, head, row)[k];
      timeline::end(timeline::loads);
      __syncthreads();  // Q, K and V have arrived; the last row's partial sums are no longer read
      OnlineSoftmax softmax;
      if (tile > 0) softmax = {*row_max.row(batch, head, row), *row_sum.row(batch, head, row)};
      const real old_sum = softmax.sum;
      real S[Bc];
      scores(shared, S, scorer);

      timeline::event(timeline::softmax, Bc);
      real largest = -infinity;
      for (int key = 0; key < Bc; ++key) {
        if (first_key + key < kv_end) largest = fmax(largest, S[key]);
      }
      const real factor = softmax.raise(largest);
      for (int key = 0; key < Bc; ++key) {
        S[key] = first_key + key < kv_end ? softmax.p(S[key]) : real(0);
        softmax.sum += S[key];
      }

      timeline::end(timeline::softmax);
      timeline::event(timeline::arithmetic, Bc * cdiv(dv, threads));
      real* sums = O_sum.row(batch, head, row);
      for (int col = threadIdx.x; col < dv; col += threads) {
        real sum = tile > 0 ? sums[col] * old_sum * factor : real(0);
        for (int key = 0; key < Bc; ++key) {
          if (first_key + key < kv_end) sum += S[key] * real(shared.V[key][col]);
        }
        sum *= softmax.inverse_sum();
        if (tile < last)
          sums[col] = sum;
        else
          O.row(batch, head, row)[col] = result(sum);
      }
      timeline::end(timeline::arithmetic);
      if (threadIdx.x == 0) {
        *row_max.row(batch, head, row) = softmax.maximum;
        *row_sum.row(batch, head, row) = softmax.sum;
        if (tile == last) *lse.row(batch, head, row) = softmax.lse();
      }
    }
  }
}
