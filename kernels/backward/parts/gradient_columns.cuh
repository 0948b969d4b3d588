#pragma once
// A block's walk through the tiles of Q and dO that see one of its keys, for all heads that share
// them, on tensor cores: dK and dV in registers, and what each step adds to dQ.

#include <ptx/cp_async.cuh>
#include <backward/parts/gradient_products.cuh>
#include <tile/shared.cuh>
#include <ptx/red.cuh>

struct Shared {
  operand K[Bc][depth];
  operand V[Bc][width];
  operand Q[stages][Br][depth];
  operand dO[stages][Br][width];
  operand P[Br][Bc];
  operand dS[Br][Bc];
  float lse[2][Br];
  float delta[2][Br];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Br % step == 0 && Bc % step == 0, "tiles are made of whole products");
static_assert(Part<Br, Bc>::whole, "warps share out S evenly");

// Steps of S and of dP at once, as many as there are registers for: beside P there are fewer, and
// tiles are largest up to d = 64.
constexpr int S_steps = depth > 64 ? 4 : 2;
constexpr int dP_steps = depth > 128 || (depth > 64 && !has_mask) ? 4 : 2;
using Scores = Part<Br, Bc>;
using KeyPart = Part<Bc, depth>;
using ValuePart = Part<Bc, width>;

// What blocks read.
struct Inputs {
  Tensor<const operand> Q, K, V, dO;
  Tensor<const real> lse, delta;
  int M, N;
};

// All tiles of rows, head by head, from the last of each to the first: so blocks that begin
// together are at the same rows, under a causal mask too.
struct Walk {
  int batch, head, first_row, first, last, left;

  __device__ __forceinline__ void advance() {
    --left;
    first_row -= Br;
    if (first_row >= first) return;
    first_row = last;
    ++head;
  }
  // Registers do not keep where the heads begin: that is found once more.
  __device__ __forceinline__ void begin_copies(Shared& shared, const Inputs& in, int stage) const {
    copy_rows<d>(shared.Q[stage], Head(in.Q, opaque(batch), opaque(head), in.M), first_row);
    copy_rows<dv>(shared.dO[stage], Head(in.dO, opaque(batch), opaque(head), in.M), first_row);
  }
  __device__ __forceinline__ RowSums load_sums(const Inputs& in) const {
    RowSums sums;
    sums.load(in.lse, in.delta, opaque(batch), opaque(head), first_row, in.M);
    return sums;
  }
};

// What dQ is added to, of all heads: a tile after the other, in the order of red.cuh.
struct Sums {
  float* data;
  int heads, tiles;

  __device__ __forceinline__ float* of(int batch, int head, int first_row) const {
    const long long tile = ((long long)batch * heads + head) * tiles + first_row / Br;
    return data + tile * (query_slices * QueryPart::fours * 4 * threads);
  }
};

// One tile of rows: P and dS, then dV += P^T dO, dK += dS^T Q and, if anyone wants it, dQ += dS K.
// Q and dO are there when it begins, and the next tile's when it ends. Unless it is `masked` every
// row sees every key. Returns whether a row of the next tile sees no key.
template <bool adds_dQ, bool masked>
__device__ __forceinline__ bool step_down(Shared& shared, const Inputs& in, Walk& walk,
                                          const Pairs& pairs, bool strange_keys, const Sums& sums,
                                          KeyPart::Sums& dK, ValuePart::Sums& dV, int turn,
                                          float scale2) {
  const int stage = stages == 2 ? turn : 0;
  const int batch = walk.batch, head = walk.head;
  walk.advance();
  const bool more = walk.left > 0;
  RowSums next;
  bool strange_rows = false;
  if constexpr (has_mask && masked)
    strange_rows =
        __syncthreads_or(has_nonfinite(shared.Q[stage]) || has_nonfinite(shared.dO[stage]));

  {
    const Scores own;
    const int lane = own_lane();
    Scores::Sums P = {}, dS = {};
    multiply_transposed<S_steps>(P, shared.Q[stage], shared.K, own, lane);
    // Where the next tile is, is found while these products go on.
    if (more) next = walk.load_sums(in);
    if (stages == 2 && more) walk.begin_copies(shared, in, 1 - stage);
    cp_async_commit_group();
    weigh<masked>(P, shared.lse[turn], own, pairs, scale2, lane);
    store_weights(shared.P, P, own, lane);
    multiply_transposed<dP_steps>(dS, shared.dO[stage], shared.V, own, lane);
    slope<masked>(dS, P, shared.lse[turn], shared.delta[turn], own, pairs, lane);
    store_weights(shared.dS, dS, own, lane);
  }
  if (more) next.store(shared.lse[1 - turn], shared.delta[1 - turn]);
  __syncthreads();  // P and dS are there

  if (has_mask && masked && strange_rows) {
    multiply_visible<true>(dV, shared.P, shared.dO[stage], ValuePart(), pairs, own_lane());
    multiply_visible<true>(dK, shared.dS, shared.Q[stage], KeyPart(), pairs, own_lane());
  } else {
    multiply_tiles<true>(dV, shared.P, shared.dO[stage], ValuePart(), own_lane());
    multiply_tiles<true>(dK, shared.dS, shared.Q[stage], KeyPart(), own_lane());
  }
  if (stages == 1) {
    __syncthreads();  // before the next tile overwrites Q and dO
    if (more) walk.begin_copies(shared, in, 0);
    cp_async_commit_group();
  }
  if constexpr (adds_dQ) {
    float* to = sums.of(batch, head, pairs.first_row);
#pragma unroll 1
    for (int slice = 0; slice < query_slices; ++slice) {
      const QueryPart own(slice);
      QueryPart::Sums dQ = {};
      if (has_mask && masked && strange_keys)
        multiply_visible<false>(dQ, shared.dS, shared.K, own, pairs, own_lane());
      else
        multiply_tiles<false>(dQ, shared.dS, shared.K, own, own_lane());
#pragma unroll
      for (int n = 0; n < QueryPart::fours; ++n) {
        const int block = n % (QueryPart::cols / 8);
        if (own.has(block / 2))
          add_four(to, slice * QueryPart::fours + n, dQ[n / (QueryPart::cols / 8)][block]);
      }
    }
  }
  cp_async_wait_group<0>();
  return __syncthreads_or(more && next.dead);  // the next tile is there, this one no longer read
}

template <bool adds_dQ>
__device__ __forceinline__ void sum_columns(Tensor<const operand> Q, Tensor<const operand> K,
                                            Tensor<const operand> V, Tensor<const operand> dO,
                                            Tensor<const real> lse, Tensor<const real> delta,
                                            float* dQ_sum, Tensor<scalar> dK_out,
                                            Tensor<scalar> dV_out, int M, int N, int kv_heads,
                                            int group, int causal_offset, int window_offset,
                                            real scale) {
  Shared& shared = shared_memory<Shared>();
  const Place at = place(blockIdx.x, max(cdiv(N, Bc), 1), kv_heads);
  const int first_key = at.tile * Bc;
  const Inputs in = {Q, K, V, dO, lse, delta, M, N};
  const RowRange rows = rows_that_see(first_key, M, N, causal_offset, window_offset);
  const int start = rows.first / Br * Br, first_head = at.head * group;
  const int tiles = rows.end > start ? cdiv(rows.end - start, Br) : 0;
  const int last = start + (tiles - 1) * Br;
  Walk walk = {at.batch, first_head, last, start, last, tiles * group};
  const Sums sums = {dQ_sum, kv_heads * group, cdiv(M, Br)};
  KeyPart::Sums dK = {};
  ValuePart::Sums dV = {};
  if (walk.left > 0) {
    const RowSums first = walk.load_sums(in);
    copy_rows<d>(shared.K, Head(K, at.batch, at.head, N), first_key);
    copy_rows<dv>(shared.V, Head(V, at.batch, at.head, N), first_key);
    walk.begin_copies(shared, in, 0);
    cp_async_commit_group();
    first.store(shared.lse[0], shared.delta[0]);
    cp_async_wait_group<0>();
    bool dead = __syncthreads_or(first.dead);  // the tiles are there
    bool strange_keys = false;
    if constexpr (adds_dQ && has_mask) strange_keys = __syncthreads_or(has_nonfinite(shared.K));
    for (int turn = 0; walk.left > 0; turn = 1 - turn) {
      const Pairs pairs = {walk.first_row, first_key, M, N, causal_offset, window_offset};
      if (dead) {
        clear_dead_rows(shared.Q[stages == 2 ? turn : 0], shared.lse[turn]);
        clear_dead_rows(shared.dO[stages == 2 ? turn : 0], shared.lse[turn]);
        __syncthreads();  // the zeros are there
      }
      const bool whole = first_key + Bc <= N && walk.first_row + Br <= M && !dead;
      if (whole && pairs.all())
        dead = step_down<adds_dQ, false>(shared, in, walk, pairs, strange_keys, sums, dK, dV, turn,
                                         scale * log2e);
      else
        dead = step_down<adds_dQ, true>(shared, in, walk, pairs, strange_keys, sums, dK, dV, turn,
                                        scale * log2e);
    }
  }
  store_gradient<d>(dK_out, dK, scale, KeyPart(), at.batch, at.head, first_key, N, own_lane());
  store_gradient<dv>(dV_out, dV, 1, ValuePart(), at.batch, at.head, first_key, N, own_lane());
}
