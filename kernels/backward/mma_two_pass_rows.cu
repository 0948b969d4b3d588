// mma_two_pass_rows: dQ by a block for each tile of Q, which walks along the tiles of K and V.
//
// As in the forward pass a warp owns its rows from start to end: dS of 16 keys is an operand of
// dQ += dS K right where the products of S and dO V^T left it, and nothing passes through shared
// memory but what copies bring.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, d, dv, causal, windowed, threads,
//   shared_bytes; pack_gqa for row_state.cuh
#include <ptx/cp_async.cuh>
#include <backward/parts/gradient_products.cuh>
#include <tile/shared.cuh>

struct Shared {
  operand Q[Br][depth];
  operand dO[Br][width];
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
  float lse[Br];
  float delta[Br];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

// A warp's rows, with all keys of a tile.
struct OwnRows {
  static constexpr int col = 0;
  int row;

  __device__ __forceinline__ bool has(int) const { return true; }
};

// dQ += dS K, of dS in registers.
__device__ __forceinline__ void multiply_keys(const Fragments<Wr, Bc>& dS, operand (&K)[Bc][depth],
                                              Fragments<Wr, depth>& dQ, const OwnRows& own,
                                              int lane) {
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&s)[4] = dS[i][2 * k + j / 2];
        a[i][j] = pack<operand>(s[j % 2 * 2], s[j % 2 * 2 + 1]);
      }
    }
    multiply_step(
        dQ, a, [&](int n) { return own.has(n); },
        [&](unsigned (&b)[4], int n) {
          ldmatrix_trans(b, at(K, k * step + lane % 16, 2 * n + lane / 16));
        });
  }
}

// The same where K holds infinities or NaN, by the keys that each row sees alone.
__device__ __forceinline__ void multiply_visible_keys(const Fragments<Wr, Bc>& dS,
                                                      operand (&K)[Bc][depth],
                                                      Fragments<Wr, depth>& dQ, const OwnRows& own,
                                                      const Pairs& pairs, int lane) {
#pragma unroll 1
  for (int key = 0; key < Bc; ++key) {
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) {
      unsigned mine = 0;
#pragma unroll
      for (int c = 0; c < Bc / 4; ++c)
        mine |= bits_if(key / 8 * 2 + key % 2 == c, dS[i / 2][c / 2][i % 2 * 2 + c % 2]);
      const float weight =
          __shfl_sync(full_warp, __uint_as_float(mine), lane / 4 * 4 + key % 8 / 2);
      const bool sees = pairs.see(own.row + i * 8 + lane / 4, key);
#pragma unroll
      for (int j = 0; j < depth / 4; ++j) {
        const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
        const float k = float(at(K, key, col / in_chunk)[col % in_chunk]);
        if (sees) dQ[i / 2][j / 2][i % 2 * 2 + j % 2] += weight * k;
      }
    }
  }
}

// The keys and values of a head. Registers do not keep where they begin: that is found once more.
struct Keys {
  Tensor<const operand> K, V;
  int batch, head, N;

  __device__ __forceinline__ void begin_copies(Shared& shared, int first_key, int stage) const {
    copy_rows<d>(shared.K[stage], Head(K, opaque(batch), opaque(head), N), first_key);
    copy_rows<dv>(shared.V[stage], Head(V, opaque(batch), opaque(head), N), first_key);
  }
};

// One tile of keys. K and V are there when it begins, and the next are when it ends.
template <bool masked>
__device__ __forceinline__ void step_along(Shared& shared, const Keys& keys, const Pairs& pairs,
                                           int end, int buffer, Fragments<Wr, depth>& dQ,
                                           float scale2, const OwnRows& own, int lane) {
  const bool more = pairs.first_key + Bc < end;
  if (stages == 2 && more) {
    keys.begin_copies(shared, pairs.first_key + Bc, 1 - buffer);
  }
  cp_async_commit_group();
  bool nonfinite = false;
  if constexpr (has_mask && masked) nonfinite = __syncthreads_or(has_nonfinite(shared.K[buffer]));
  Fragments<Wr, Bc> P = {}, dS = {};
  multiply_transposed(P, shared.Q, shared.K[buffer], own, lane);
  weigh<masked>(P, shared.lse, own, pairs, scale2, lane);
  multiply_transposed(dS, shared.dO, shared.V[buffer], own, lane);
  slope<masked>(dS, P, shared.lse, shared.delta, own, pairs, lane);
  if (has_mask && masked && nonfinite)
    multiply_visible_keys(dS, shared.K[buffer], dQ, own, pairs, lane);
  else
    multiply_keys(dS, shared.K[buffer], dQ, own, lane);
  if (stages == 1) {
    __syncthreads();  // before the next tile overwrites K and V
    if (more) {
      keys.begin_copies(shared, pairs.first_key + Bc, 0);
    }
    cp_async_commit_group();
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K and V are there, and these are no longer read
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_two_pass_rows(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, Tensor<scalar> dQ,
    int M, int N, int heads, int group, int causal_offset, int window_offset, real scale) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(M, Br);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const int first_row = (tiles - 1 - tile) * Br;  // the longest rows of a causal mask first
  const int lane = threadIdx.x % warp_size;
  const OwnRows own = {int(threadIdx.x) / warp_size * Wr};
  const int start = kv_begin(first_row, N, window_offset) / Bc * Bc;
  const int end = kv_end(min(first_row + Br, M) - 1, N, causal_offset);
  const Keys keys = {K, V, batch, head / group, N};

  RowSums sums;
  sums.load(lse, delta, batch, head, first_row, M);
  copy_rows<d>(shared.Q, Head(Q, batch, head, M), first_row);
  copy_rows<dv>(shared.dO, Head(dO, batch, head, M), first_row);
  keys.begin_copies(shared, start, 0);
  cp_async_commit_group();
  sums.store(shared.lse, shared.delta);
  cp_async_wait_group<0>();
  const bool dead = __syncthreads_or(sums.dead);  // the tiles are there
  if (dead) {
    clear_dead_rows(shared.Q, shared.lse);
    clear_dead_rows(shared.dO, shared.lse);
    __syncthreads();  // the zeros are there
  }
  const bool whole = first_row + Br <= M && !dead;
  Fragments<Wr, depth> rows = {};
  int buffer = 0;
  for (int first_key = start; first_key < end; first_key += Bc) {
    const Pairs pairs = {first_row, first_key, M, N, causal_offset, window_offset};
    if (whole && first_key + Bc <= N && pairs.all())
      step_along<false>(shared, keys, pairs, end, buffer, rows, scale * log2e, own, lane);
    else
      step_along<true>(shared, keys, pairs, end, buffer, rows, scale * log2e, own, lane);
    buffer = stages - 1 - buffer;
  }
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const bool counts = shared.lse[own.row + i * 8 + lane / 4] != -infinity;
#pragma unroll
    for (int j = 0; j < depth / 4; ++j) {
      float& sum = rows[i / 2][j / 2][i % 2 * 2 + j % 2];
      sum = counts ? sum : 0.0f;  // 0 * NaN of a key would not be 0
    }
  }
  store_gradient<d>(dQ, rows, scale, own, batch, head, first_row, M, lane);
}
