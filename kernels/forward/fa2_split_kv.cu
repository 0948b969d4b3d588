// fa2_split_kv: `fa2_coalesced` for few queries; several blocks split the keys of a tile of Q.
//
// In `fa2_coalesced` a thread owns a row: with one query, all other threads are idle. Here all
// threads share the rows. Each thread computes the score of one row and key at a time, and later
// some columns of O for all rows, which it accumulates in registers. Query heads that share a key
// head (GQA) are rows of one tile. Each of `num_splits` blocks processes one split of the keys, and
// merge_rows combines their results. A single split writes O and lse itself.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_splits [batch, heads, M, num_splits, dv]
//   max_splits, sum_splits [batch, heads, M, num_splits]
//   grid (cdiv(M * pack_gqa, Br) * num_splits * heads / pack_gqa * batch)    block (threads)
//   the host sets: scalar, result, real, Br, Bc, pack_gqa, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/online_softmax.cuh>
#include <attention/score.cuh>
#include <tile/block_copy.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp_max.cuh>
#include <timeline.cuh>

constexpr int KV_width = (d > dv ? d : dv) | 1;  // odd: a column of the tile spans all banks
constexpr int own_cols = cdiv(dv, threads);      // columns of O per thread, interleaved
constexpr int warps = threads / warp_size;

struct alignas(16) Shared {
  real S[Br][Bc];
  OnlineSoftmax softmax[Br];
  real factor[Br];  // rescales the sums of earlier tiles
  alignas(16) scalar Q[Br][d];
  scalar KV[Bc][KV_width];  // K, later overwritten by V
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads % warp_size == 0, "shuffles need whole warps");

// Marks masked keys in P: their values are skipped, because they may be NaN.
constexpr real hidden = -1;

// The rows of a tile: one row per query and packed query head, with the heads of a query adjacent.
struct Rows {
  Extent extent;  // extent of the first packed head
  int first, head;

  __device__ int query(int i) const { return (first + i) / pack_gqa; }
  __device__ int own_head(int i) const { return head + (first + i) % pack_gqa; }
  __device__ bool exists(int i) const { return query(i) < extent.M; }
  __device__ decltype(auto) context(int i) const { return extent_of_head(extent, own_head(i)); }
  __device__ bool sees(int i, int key) const { return exists(i) && context(i).sees(query(i), key); }
};

// The range of keys that a block processes. The lengths of splits differ by at most one tile.
struct Split {
  int begin, end;

  __device__ Split(const Rows& rows, int number, int num_splits) {
    const int last = min(rows.query(Br - 1), rows.extent.M - 1);
    const int start = rows.extent.kv_begin(rows.query(0)) / Bc * Bc;
    end = rows.extent.kv_end(last);
    const int tiles = cdiv(max(0, end - start), Bc), less = tiles / num_splits,
              rest = tiles % num_splits;
    begin = start + (number * less + min(number, rest)) * Bc;
    end = min(end, begin + (less + (number < rest)) * Bc);
  }
};

__device__ void load_queries(Shared& shared, Tensor<const scalar> Q, const Rows& rows, int batch) {
  const timeline::Phase phase(timeline::loads, size_t(Q.data) / 16);
  share_out<threads, Br * d, 4>([&](int i, int) {
    const int row = i / d, col = i % d;
    shared.Q[row][col] =
        rows.exists(row) ? Q.row(batch, rows.own_head(row), rows.query(row))[col] : scalar(real(0));
  });
}

// Computes S of the tile, one row and key per thread at a time; -infinity for masked keys.
__device__ void scores(Shared& shared, const Rows& rows, int first_key,
                       const Scorer<real>& scorer) {
  const timeline::Phase phase(timeline::arithmetic, Br * Bc * d / threads);
  share_out<threads, Br * Bc, 1>([&](int i, int) {
    const int row = i / Bc, key = i % Bc;
    real dot = 0;
#pragma unroll 8
    for (int k = 0; k < d; ++k) dot += real(shared.Q[row][k]) * real(shared.KV[key][k]);
    const bool seen = rows.sees(row, first_key + key);
    shared.S[row][key] =
        seen ? scorer(dot, rows.context(row), rows.query(row), first_key + key) : -infinity;
  });
}

// Turns S into P, one row per warp at a time, and updates the row's maximum and sum.
__device__ void exponentiate(Shared& shared, const Rows& rows, int first_key) {
  const timeline::Phase phase(timeline::softmax, Br * Bc / threads);
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  for (int row = warp; row < Br; row += warps) {
    real largest = -infinity, sum = 0;
    for (int key = lane; key < Bc; key += warp_size) largest = fmax(largest, shared.S[row][key]);
    OnlineSoftmax softmax = shared.softmax[row];
    const real factor = softmax.raise(warp_max(largest));
    for (int key = lane; key < Bc; key += warp_size) {
      const real p = softmax.p(shared.S[row][key]);
      const bool seen = rows.sees(row, first_key + key);
      shared.S[row][key] =
          seen ? rows.context(row).dropped(p, rows.query(row), first_key + key) : hidden;
      if (seen) sum += p;
    }
    softmax.sum += warp_sum(sum);
    __syncwarp();  // all lanes have read the row's old state
    if (lane == 0) {
      shared.softmax[row] = softmax;
      shared.factor[row] = factor;
    }
  }
}

// Adds this thread's columns of P V to O. As in `fa2`, the tile's P V is summed separately first.
__device__ void accumulate(const Shared& shared, real (&O)[Br][own_cols]) {
  const timeline::Phase phase(timeline::arithmetic, Br * Bc * own_cols);
  real sums[Br][own_cols] = {};
#pragma unroll 4
  for (int key = 0; key < Bc; ++key) {
    real v[own_cols];
#pragma unroll
    for (int i = 0; i < own_cols; ++i) {
      const int col = threadIdx.x + i * threads;
      v[i] = col < dv ? real(shared.KV[key][col]) : real(0);
    }
#pragma unroll
    for (int row = 0; row < Br; ++row) {
      const real p = shared.S[row][key];
      if (p == hidden) continue;
#pragma unroll
      for (int i = 0; i < own_cols; ++i) sums[row][i] += p * v[i];
    }
  }
#pragma unroll
  for (int row = 0; row < Br; ++row)
#pragma unroll
    for (int i = 0; i < own_cols; ++i) O[row][i] = O[row][i] * shared.factor[row] + sums[row][i];
}

extern "C" __global__ __launch_bounds__(threads) void fa2_split_kv(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<result> O,
    Tensor<real> lse, real* O_splits, real* max_splits, real* sum_splits, int num_splits,
    Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(sizes.M * pack_gqa, Br);
  const auto [index, first_head, batch] = place(blockIdx.x, tiles * num_splits, heads / pack_gqa);
  const int head = first_head * pack_gqa, number = index / tiles;
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const Rows rows = {extent_of(sizes, mods, batch, head), (tiles - 1 - index % tiles) * Br, head};
  if (!rows.extent.has_tile_of_rows(rows.query(0))) return;
  const Split split(rows, number, num_splits);
  const Scorer<real> scorer = {scale, mods};

  load_queries(shared, Q, rows, batch);
  for (int row = threadIdx.x; row < Br; row += threads) {
    shared.softmax[row] = {};
    if (number == 0) shared.softmax[row].begin_with(rows.context(row).sink());
  }
  real sums[Br][own_cols] = {};
  for (int first_key = split.begin; first_key < split.end; first_key += Bc) {
    timeline::event(timeline::tile, first_key, rows.query(0));
    __syncthreads();  // before K overwrites values that a slower thread still reads
    load_tile<threads, d>(shared.KV, rows_of(K, mods), batch, head / group, first_key, split.end);
    __syncthreads();  // K has arrived
    scores(shared, rows, first_key, scorer);
    __syncthreads();  // S is written, and K is no longer read
    load_tile<threads, dv>(shared.KV, rows_of(V, mods), batch, head / group, first_key, split.end);
    exponentiate(shared, rows, first_key);
    __syncthreads();  // P and V are ready
    accumulate(shared, sums);
  }
  __syncthreads();  // without keys, nothing else waits for the initial maxima and sums
  const timeline::Phase phase(timeline::epilogue);

#pragma unroll
  for (int row = 0; row < Br; ++row) {
    if (!rows.exists(row)) break;
    const OnlineSoftmax& softmax = shared.softmax[row];
    const int own_head = rows.own_head(row), query = rows.query(row);
    const long long all = ((long long)batch * heads + own_head) * sizes.M + query;
    const long long place = all * num_splits + number;
#pragma unroll
    for (int i = 0; i < own_cols; ++i) {
      const int col = threadIdx.x + i * threads;
      if (col >= dv) break;
      if (num_splits > 1)
        O_splits[place * dv + col] = sums[row][i];
      else
        O.row(batch, own_head, query)[col] = result(sums[row][i] * softmax.inverse_sum());
    }
    if (threadIdx.x > 0) continue;
    if (num_splits > 1) {
      max_splits[place * stored_maxima] = softmax.maximum;
      if (has_row_max) max_splits[place * stored_maxima + 1] = softmax.row_max(0);
      sum_splits[place] = softmax.sum;
    } else {
      *lse.row(batch, own_head, query) = softmax.lse();
      write_row_max(rows.context(row), query, softmax.row_max(0), softmax.sum);
    }
  }
}
