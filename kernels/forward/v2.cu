// v2: one warp per row, so Br rows of Q at a time.
//
// `v1` reduces each dot product over the whole block, which costs a barrier per row. Here a warp
// reduces across its lanes with shuffles: the loop over rows needs no barrier, and each warp works
// on its row independently.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum [batch, heads, M, dv], row_max, row_sum [batch, heads, M]: scratch
//   grid (heads * batch)    block (32 * Br)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/score.cuh>
#include <forward/parts/last_tile.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/block_copy.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

struct Shared {
  scalar Q[Br][d];
  scalar K[Bc][d];
  scalar V[Bc][dv];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br, "one warp per row of the Q tile");

// Computes the scores of this warp's row for all keys of the tile; every lane gets all of them.
__device__ void scores(Shared& shared, real (&S)[Bc], int warp, int lane,
                       const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, Bc * cdiv(d, warp_size));
  for (int key = 0; key < Bc; ++key) {
    real dot = 0;
    for (int k = lane; k < d; k += warp_size) {
      dot += real(shared.Q[warp][k]) * real(shared.K[key][k]);
    }
    S[key] = scorer(warp_sum(dot));
  }
}

extern "C" __global__ __launch_bounds__(threads) void v2(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<result> O,
    Tensor<real> lse, Tensor<real> O_sum, Tensor<real> row_max, Tensor<real> row_sum, Sizes sizes,
    int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [_, head, batch] = place(blockIdx.x, 1, heads);
  const int kv_head = head / group;
  const Extent extent = extent_of(sizes, batch);
  const Scorer<real> scorer = {scale, mods};
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;

  for (int tile = 0; tile <= last_tile(extent.N, Bc); ++tile) {
    const int first_key = tile * Bc;
    timeline::event(timeline::tile, first_key, 0);
    __syncthreads();  // before this tile overwrites keys that a slower warp still reads
    load_tile<threads, d>(shared.K, K, batch, kv_head, first_key, extent.N);
    load_tile<threads, dv>(shared.V, V, batch, kv_head, first_key, extent.N);
    __syncthreads();  // K and V have arrived

    for (int row = warp; row < extent.M; row += Br) {
      const int kv_end = extent.kv_end(row);
      const int last = last_tile(kv_end, Bc);
      if (tile > last) continue;

      timeline::event(timeline::tile, first_key, row - warp);
      timeline::event(timeline::loads, size_t(Q.data) / 16);
      for (int k = lane; k < d; k += warp_size) shared.Q[warp][k] = Q.row(batch, head, row)[k];
      timeline::end(timeline::loads);
      OnlineSoftmax softmax;
      if (tile > 0) softmax = {*row_max.row(batch, head, row), *row_sum.row(batch, head, row)};
      const real old_sum = softmax.sum;
      real S[Bc];
      scores(shared, S, warp, lane, scorer);

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
      timeline::event(timeline::arithmetic, Bc * cdiv(dv, warp_size));
      real* sums = O_sum.row(batch, head, row);
      for (int col = lane; col < dv; col += warp_size) {
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
      __syncwarp();  // every lane has read the row's old maximum and sum
      if (lane == 0) {
        *row_max.row(batch, head, row) = softmax.maximum;
        *row_sum.row(batch, head, row) = softmax.sum;
        if (tile == last) *lse.row(batch, head, row) = softmax.lse();
      }
    }
  }
}
