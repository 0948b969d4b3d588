// wgmma_fp8: `wgmma_overlap` on e4m3, whose products are twice as fast as those of 16 bits.
//
// `quantise` has made Q, K and V transposed of 8 bits, with a power of two for each tile. Those of
// Q and K join the scale of the scores. O is kept in units of the largest that a tile of V has had
// so far: a tile with a larger one rescales O, the weights of one with a smaller one are lowered.
// Weights are 2^offset times as large as usual, which makes use of the range of e4m3. Four of them
// fill a register of the second product, in the order in which V8 has its keys.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q8, K8, V8 and Q_scale, K_scale, V_scale as quantise.cu has them
//   grid (cdiv(M, Br) * heads * batch)    block (128 + 2 * Br)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, causal, windowed,
//   threads, shared_bytes
#include <forward/parts/consumers.cuh>
#include <ptx/e4m3.cuh>
#include <attention/mask.cuh>
#include <forward/parts/row_tile.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <forward/parts/ping_pong.cuh>

constexpr int offset = 6;
constexpr int tolerated = 8 - offset;  // as slack: no weight is above 2^8, and e4m3 ends at 448
constexpr int depth = 32;              // of a product
static_assert(Bc % depth == 0, "tiles are made of whole products");

using Queries8 = TmaTile<E4m3, Br, d>;
using Keys8 = TmaTile<E4m3, Bc, d>;
using Values8 = TmaTile<E4m3, width, Bc>;  // a row for each column of V
using Weights8 = unsigned[Bc / depth][4];

struct Shared {
  Queries8 Q;
  Keys8 K[stages];
  Values8 V[stages];
  Barrier Q_full, K_full[stages], V_full[stages], K_empty[stages], V_empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.Q_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.K_full[i], 1);
    init_barrier(shared.V_full[i], 1);
    init_barrier(shared.K_empty[i], consumers);
    init_barrier(shared.V_empty[i], consumers);
  }
  fence_barrier_init();
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int kv_head) {
  load_async(shared.Q, Q, shared.Q_full, work.row, work.head, work.batch);
  PipelineState<stages> turn;
#pragma unroll 1  // it has few registers
  for (int first_key = work.start; first_key < work.end; first_key += Bc, turn.advance()) {
    const int i = turn.stage;
    wait(shared.K_empty[i], turn.phase ^ 1);
    load_async(shared.K[i], K, shared.K_full[i], first_key, kv_head, work.batch);
    wait(shared.V_empty[i], turn.phase ^ 1);
    load_async(shared.V[i], V, shared.V_full[i], 0, kv_head, work.batch, first_key);
  }
}

// Begins S = Q K^T for the warpgroup's rows and a tile's keys.
__device__ __forceinline__ void begin_scores(const Queries8& Q, const Keys8& K,
                                             Fragments<step, Bc>& S, int warpgroup) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < cdiv(d, depth); ++k) {
    const Matrix queries = by_rows(Q.box[k / 4][warpgroup * warpgroup_rows]);
    multiply<E4m3>(flat(S), queries + k % 4 * 32, by_rows(K.box[k / 4]) + k % 4 * 32, k > 0);
  }
  wgmma_commit_group();
}

// Begins O += P V.
__device__ __forceinline__ void begin_output(const Values8& V, const Weights8& P,
                                             Fragments<step, width>& O) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Bc / depth; ++k)
    multiply<E4m3>(flat(O), P[k], by_rows(V.box[k / 4]) + k % 4 * 32, true);
  wgmma_commit_group();
}

// The scales of a tile of keys.
struct Units {
  float K, V;
};

// The scales of a head's tiles of keys, and what O is in units of.
struct Scales {
  const float *K, *V;
  float own, of_O = 0;
  bool nonfinite = false;  // whether a tile of V has what is infinite or NaN

  __device__ __forceinline__ Units at(int first_key) {
    const float of_V = V[first_key / Bc];
    nonfinite |= of_V < 0;
    return {K[first_key / Bc], fabs(of_V)};
  }
  // That of scores as they come, neither 0 nor infinite: masked ones are to stay -infinity.
  __device__ __forceinline__ float of_scores(float of_K) const {
    return fmin(fmax(own * of_K, 1.17549435e-38f), largest_float);
  }
};

// S becomes P for a tile that some row does not see all of, if it is `masked`. Returns whether O
// has to be multiplied by the factors.
__device__ __forceinline__ bool weigh(Fragments<step, Bc>& S, Rows<step>& rows, Scales& scales,
                                      Units units, int first_key, int lane, bool masked,
                                      float (&factor)[1][2]) {
  rows.scale2 = scales.of_scores(units.K);
  bool risen = masked ? raise_maxima<true, tolerated>(S, rows, first_key, lane, factor)
                      : raise_maxima<false, tolerated>(S, rows, first_key, lane, factor);
  rows.scale(factor);
  Rows<step> higher = rows;
  for (float& maximum : higher.maximum[0]) maximum -= offset;
  exponentiate(S, higher);
  for (int half = 0; half < 2; ++half) rows.sum[0][half] = higher.sum[0][half];
  if (units.V > scales.of_O) {
    for (float& x : factor[0]) x *= scales.of_O / units.V;
    scales.of_O = units.V;
    risen = true;
  }
  if (units.V < scales.of_O) {
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][n][e] *= units.V / scales.of_O;
    }
  }
  return risen;
}

__device__ __forceinline__ void pack_weights(const Fragments<step, Bc>& S, Weights8& P) {
#pragma unroll
  for (int i = 0; i < Bc / 8; ++i) {
    const float (&low)[4] = S[0][i / 2 * 2], (&high)[4] = S[0][i / 2 * 2 + 1];
    const int half = i % 2 * 2;
    P[i / 4][i % 4] = pack_e4m3(low[half], low[half + 1], high[half], high[half + 1]);
  }
}

// What a warpgroup of consumers does. While it computes the weights of a tile, the tensor cores
// work on O += P V of the tile before, and for other warpgroups.
__device__ __forceinline__ void consume(Shared& shared, const Work& work, int warpgroup,
                                        Rows<step>& rows, Scales& scales, Fragments<step, width>& O,
                                        int M) {
  if (work.start >= work.end) return;
  const int lane = threadIdx.x % warp_size;
  const bool leads = threadIdx.x % warpgroup_size == 0;
  const int seen_by_all = kv_end(work.row, rows.extent.N, rows.extent.causal_offset);
  const int hidden_from_some =
      kv_begin(min(work.row + Br, M) - 1, rows.extent.N, rows.extent.window_offset);
  const auto masked = [&](int first_key) {
    return first_key + Bc > seen_by_all || first_key < hidden_from_some;
  };
  Fragments<step, Bc> S;
  Weights8 P;
  PipelineState<stages> keys, values;
  float factor[1][2];
  Units units = scales.at(work.start);
  wait(shared.K_full[0], 0);
  begin_scores(shared.Q, shared.K[0], S, warpgroup);
  wgmma_wait_group<0>(flat(S));
  if (leads) arrive(shared.K_empty[0]);
  if (warpgroup == 0) pass_turn(consumers - 1);
  weigh(S, rows, scales, units, work.start, lane, masked(work.start), factor);
  pack_weights(S, P);
  for (int first_key = work.start + Bc; first_key < work.end; first_key += Bc) {
    keys.advance();
    units = scales.at(first_key);
    wait(shared.K_full[keys.stage], keys.phase);
    await_turn(warpgroup);
    begin_scores(shared.Q, shared.K[keys.stage], S, warpgroup);
    wait(shared.V_full[values.stage], values.phase);
    begin_output(shared.V[values.stage], P, O);
    pass_turn(warpgroup);
    wgmma_wait_group<1>(flat(S));
    if (leads) arrive(shared.K_empty[keys.stage]);
    const bool risen = weigh(S, rows, scales, units, first_key, lane, masked(first_key), factor);
    wgmma_wait_group<0>(flat(O));
    if (leads) arrive(shared.V_empty[values.stage]);
    pack_weights(S, P);
    if (risen) scale_rows(O, factor);
    values = keys;
  }
  wait(shared.V_full[values.stage], values.phase);
  begin_output(shared.V[values.stage], P, O);
  wgmma_wait_group<0>(flat(O));
}

// Adds what is infinite or NaN in V, for which V8 has 0, to the warp's rows that see it.
__device__ void add_strange_values(Tensor<const operand> V, Tensor<scalar> O,
                                   const Rows<step>& rows, const Scales& scales, const Work& work,
                                   int kv_head, int M) {
  const int lane = threadIdx.x % warp_size, first = __shfl_sync(full_warp, rows.first, 0);
  __syncwarp();  // before a lane adds to what others have stored
  for (int key = work.start; key < work.end; ++key) {
    if (scales.V[key / Bc] > 0) continue;
    for (int col = lane; col < dv; col += warp_size) {
      const float value = float(V.row(work.batch, kv_head, key)[col]);
      if (fabs(value) < infinity) continue;
      for (int row = first; row < min(first + step, M); ++row) {
        if (!rows.extent.sees(row, key)) continue;
        scalar& o = O.row(work.batch, work.head, row)[col];
        o = scalar(float(o) + value);
      }
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp8(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const float* Q_scale, const float* K_scale,
    const float* V_scale, Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, int M, int N,
    int heads, int group, int causal_offset, int window_offset, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work<Br, Bc>(blockIdx.x, M, N, heads, causal_offset, window_offset);
  const int kv_head = work.head / group, warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && elect_one()) produce(shared, work, Q_map, K_map, V_map, kv_head);
    return;
  }
  take_from_producer();
  const int lane = threadIdx.x % warp_size;
  const int own_row = threadIdx.x / warp_size * step - warpgroup_rows;
  Rows<step> rows(work.row + own_row + lane / 4, Extent{M, N, causal_offset, window_offset},
                  log2e * (scale == 0 ? 1.0f : fabs(scale)));
  const int head = work.batch * heads + work.head;
  const int first_tile = head / group * cdiv(N, Bc);
  Scales scales = {K_scale + first_tile, V_scale + first_tile,
                   rows.scale2 * Q_scale[head * cdiv(M, Br) + work.row / Br]};
  Fragments<step, width> sums = {};
  wait(shared.Q_full, 0);
  consume(shared, work, warpgroup, rows, scales, sums, M);
  for (float& maximum : rows.maximum[0]) maximum -= offset;
  finish_rows(sums, rows, lse, work.batch, work.head, lane);
  const float unit[1][2] = {{scales.of_O, scales.of_O}};
  scale_rows(sums, unit);
  if constexpr (sizeof(scalar) == 2)
    store_pieces(sums, rows, O, work.batch, work.head, M, lane);
  else
    store_rows<dv>(sums, rows, O, work.batch, work.head, lane);
  if (scales.nonfinite) add_strange_values(V, O, rows, scales, work, kv_head, M);
}
