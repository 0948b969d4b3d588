// minimal: the FlashAttention-1 algorithm, one thread per row.
//
// S and P never reach global memory. A tile of K and V stays in shared memory while the block loops
// over all tiles of Q. Every K/V tile updates each row's output, maximum and sum, which are kept in
// global memory between tiles. (Dao et al., 2022, arXiv:2205.14135, algorithm 1)
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum [batch, heads, M, dv], row_max, row_sum [batch, heads, M]: scratch
//   grid (heads * batch): one block per head, so most of the GPU is idle    block (Bc)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/score.cuh>
#include <forward/parts/last_tile.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

struct Shared {
  real S[Br][Bc];
  scalar Q[Br][d];
  scalar K[Bc][d];
  scalar V[Bc][dv];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == Bc, "one thread loads one row of the K and V tiles");
static_assert(Br <= threads, "one thread owns one row of the Q tile");

template <int width>
__device__ void load_row(scalar (&tile)[width], const scalar* row) {
  const timeline::Phase phase(timeline::loads, size_t(row) / 16);
  for (int col = 0; col < width; ++col) tile[col] = row[col];
}

// Computes this thread's row of S = Q K^T and returns its maximum.
__device__ real scores(Shared& shared, int keys, const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, Bc * d);
  real largest = -infinity;
  for (int col = 0; col < keys; ++col) {
    real dot = 0;
    for (int k = 0; k < d; ++k) dot += real(shared.Q[threadIdx.x][k]) * real(shared.K[col][k]);
    const real score = scorer(dot);
    shared.S[threadIdx.x][col] = score;
    largest = fmax(largest, score);
  }
  return largest;
}

// Turns this thread's row of S into P = exp(S - maximum) and returns its sum.
__device__ real exponentiate(Shared& shared, int keys, const OnlineSoftmax& softmax) {
  const timeline::Phase phase(timeline::softmax, Bc);
  real sum = 0;
  for (int col = 0; col < keys; ++col) {
    const real p = softmax.p(shared.S[threadIdx.x][col]);
    shared.S[threadIdx.x][col] = p;
    sum += p;
  }
  return sum;
}

extern "C" __global__ __launch_bounds__(threads, 1) void minimal(
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
    if (first_key + int(threadIdx.x) < extent.N) {
      load_row(shared.K[threadIdx.x], K.row(batch, kv_head, first_key + threadIdx.x));
      load_row(shared.V[threadIdx.x], V.row(batch, kv_head, first_key + threadIdx.x));
    }
    __syncthreads();  // K and V have arrived

    for (int row = threadIdx.x; row < extent.M && threadIdx.x < Br; row += Br) {
      const int kv_end = extent.kv_end(row);
      const int last = last_tile(kv_end, Bc);
      if (tile > last) continue;

      timeline::event(timeline::tile, first_key, row);
      OnlineSoftmax softmax;
      if (tile > 0) softmax = {*row_max.row(batch, head, row), *row_sum.row(batch, head, row)};
      load_row(shared.Q[threadIdx.x], Q.row(batch, head, row));
      const int keys = min(Bc, kv_end - first_key);
      const real old_sum = softmax.sum;
      const real factor = softmax.raise(scores(shared, keys, scorer));
      softmax.sum += exponentiate(shared, keys, softmax);

      timeline::event(timeline::arithmetic, Bc * dv);
      real* sums = O_sum.row(batch, head, row);
      for (int col = 0; col < dv; ++col) {
        real sum = 0;  // sums this tile first: small numbers lose bits in a large sum
        for (int k = 0; k < keys; ++k) sum += shared.S[threadIdx.x][k] * real(shared.V[k][col]);
        if (tile > 0) sum += sums[col] * old_sum * factor;
        sum *= softmax.inverse_sum();
        if (tile < last)
          sums[col] = sum;
        else
          O.row(batch, head, row)[col] = result(sum);
      }
      timeline::end(timeline::arithmetic);
      *row_max.row(batch, head, row) = softmax.maximum;
      *row_sum.row(batch, head, row) = softmax.sum;
      if (tile == last) *lse.row(batch, head, row) = softmax.lse();
    }
  }
}
