// wgmma: the tensor cores of Hopper, fed by a warp that does nothing else.
//
// One thread of a producer warp asks the tensor memory accelerator for Q, and for tiles of K and V
// in turn, `stages` ahead. Each warpgroup of consumers owns 64 rows and multiplies them with a tile
// as a whole: operands come straight from shared memory, and only P is in registers. Barriers in
// shared memory say which buffers are full, and which are read and may be filled again; no barrier
// is for all threads. The fragments are those of `mma_async`, and so is what is done with them.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (128 + 2 * Br)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, packed, d, dv, causal, windowed,
//   threads, shared_bytes
#include <barrier.cuh>
#include <boxes.cuh>
#include <fragments.cuh>
#include <mask.cuh>
#include <named_barrier.cuh>
#include <quads.cuh>
#include <recompute.cuh>
#include <shared.cuh>
#include <tensor.cuh>
#include <tma.cuh>
#include <warpgroup.cuh>
#include <wgmma.cuh>

constexpr int warpgroup_rows = 64;
constexpr int consumers = Br / warpgroup_rows;  // warpgroups

struct Shared {
  Boxes<operand, Br, d> Q;  // at the end O takes its place
  Boxes<operand, Bc, d> K[stages];
  Boxes<operand, Bc, dv> V[stages];
  Barrier Q_full, K_full[stages], V_full[stages], K_empty[stages], V_empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == (consumers + 1) * warpgroup_size, "a warpgroup is the producer's");
static_assert(Br % warpgroup_rows == 0 && Wr == 16 && packed == 1, "a warpgroup owns 64 rows");

// The tiles of keys that a block goes through, and of which rows and heads.
struct Work {
  int row, head, batch, start, end;
};

__device__ __forceinline__ Work find_work(int M, int N, int heads, int diagonal, int lower) {
  const int tiles = cdiv(M, Br);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const int row = (tiles - 1 - tile) * Br;  // the longest rows of a causal mask first
  return {row, head, batch, hidden_keys(row, N, lower) / Bc * Bc,
          visible_keys(min(row + Br, M) - 1, N, diagonal)};
}

// Which of the buffers comes next, and in which phase its barriers are.
struct Turn {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
};

__device__ __forceinline__ void make_barriers(Shared& shared) {
  make_barrier(shared.Q_full, 1);
  for (int i = 0; i < stages; ++i) {
    make_barrier(shared.K_full[i], 1);
    make_barrier(shared.V_full[i], 1);
    make_barrier(shared.K_empty[i], consumers);
    make_barrier(shared.V_empty[i], consumers);
  }
  publish_barriers();
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int kv_head) {
  load_boxes(shared.Q, Q, shared.Q_full, work.row, work.head, work.batch);
  Turn turn;
  for (int first_key = work.start; first_key < work.end; first_key += Bc) {
    const int i = turn.stage;
    wait(shared.K_empty[i], turn.phase ^ 1);
    load_boxes(shared.K[i], K, shared.K_full[i], first_key, kv_head, work.batch);
    wait(shared.V_empty[i], turn.phase ^ 1);
    load_boxes(shared.V[i], V, shared.V_full[i], first_key, kv_head, work.batch);
    turn.advance();
  }
}

// Takes the sign of the scale, or its being 0, into the warpgroup's rows of Q.
__device__ void apply_sign(Shared& shared, float scale, int warpgroup) {
  constexpr int chunks = decltype(shared.Q)::count * box_columns / 8;
  for (int i = threadIdx.x % warpgroup_size; i < warpgroup_rows * chunks; i += warpgroup_size) {
    operand* q = shared.Q.at(warpgroup * warpgroup_rows + i / chunks, i % chunks);
    for (int j = 0; j < 8; ++j) q[j] = operand(float(q[j]) * (scale < 0 ? -1.0f : 0.0f));
  }
  publish_to_copies();
  barrier_sync(1 + warpgroup, warpgroup_size);
}

// S = Q K^T for the warpgroup's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, int stage, int warpgroup,
                                                Fragments<Bc>& S) {
  begin_products();
#pragma unroll
  for (int k = 0; k < cdiv(d, step); ++k) {
    const Matrix rows = by_rows(shared.Q.box[k / 4][warpgroup * warpgroup_rows]);
    const Matrix keys = by_rows(shared.K[stage].box[k / 4]);
    multiply<operand>(flat(S), rows + k % 4 * 32, keys + k % 4 * 32, k > 0);
  }
  commit_products();
  wait_for_products<0>(flat(S));
}

// O += P V.
__device__ __forceinline__ void multiply_output(Shared& shared, int stage, const Fragments<Bc>& P,
                                                Fragments<width>& O) {
  unsigned a[Bc / step][4];
#pragma unroll
  for (int i = 0; i < Bc / 4; ++i) {
    const float (&p)[4] = P[0][i / 2];
    a[i / 4][i % 4] = pack<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
  }
  begin_products();
#pragma unroll
  for (int k = 0; k < Bc / step; ++k)
    multiply<operand>(flat(O), a[k], by_columns(shared.V[stage].box, Bc) + k * 2048, true);
  commit_products();
  wait_for_products<0>(flat(O));
}

// What each warpgroup of consumers does: for each tile S = Q K^T, P = softmax(S), O += P V.
__device__ __forceinline__ void consume(Shared& shared, const Work& work, int warpgroup, Rows& rows,
                                        Fragments<width>& O, int M) {
  const int lane = threadIdx.x % warp_size;
  const bool leads = threadIdx.x % warpgroup_size == 0;
  const int seen_by_all = visible_keys(work.row, rows.N, rows.diagonal);
  const int hidden_from_some = hidden_keys(min(work.row + Br, M) - 1, rows.N, rows.lower);
  Turn turn;
  for (int first_key = work.start; first_key < work.end; first_key += Bc) {
    Fragments<Bc> S;
    wait(shared.K_full[turn.stage], turn.phase);
    multiply_scores(shared, turn.stage, warpgroup, S);
    if (leads) arrive(shared.K_empty[turn.stage]);
    if (first_key + Bc <= seen_by_all && first_key >= hidden_from_some)
      softmax<false>(S, O, rows, first_key, lane);
    else
      softmax<true>(S, O, rows, first_key, lane);
    wait(shared.V_full[turn.stage], turn.phase);
    multiply_output(shared, turn.stage, S, O);
    if (leads) arrive(shared.V_empty[turn.stage]);
    turn.advance();
  }
}

// Writes the warp's rows of O.
__device__ __forceinline__ void store_output(const Fragments<width>& O, const Rows& rows,
                                             Tensor<scalar> out, const Work& work, int M,
                                             int lane) {
  const bool aligned = is_aligned(out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[width / 8];
#pragma unroll
    for (int n = 0; n < width / 8; ++n)
      pairs[n] = pack<scalar>(O[0][n][half * 2], O[0][n][half * 2 + 1]);
    const int row = rows.row(0, half);
    store_row<dv>(out.row(work.batch, work.head, row), pairs, 0, aligned, row < M, lane);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, int M, int N, int heads, int group,
    int diagonal, int lower, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(M, N, heads, diagonal, lower);
  const int kv_head = work.head / group, warpgroup = uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_registers<consumers == 3 ? 32 : 24>();
    if (threadIdx.x < warp_size && is_elected())
      produce(shared, work, Q_map, K_map, V_map, kv_head);
    return;
  }
  take_registers<consumers == 3 ? 160 : 240>();
  const int lane = threadIdx.x % warp_size;
  const int own_row = warpgroup * warpgroup_rows + threadIdx.x % warpgroup_size / warp_size * step;
  Rows rows(work.row + own_row + lane / 4, N, diagonal, lower, scale == 0 ? 1.0f : fabs(scale));
  Fragments<width> sums = {};
  wait(shared.Q_full, 0);
  if (scale <= 0) apply_sign(shared, scale, warpgroup);
  consume(shared, work, warpgroup, rows, sums, M);
  finish_rows(sums, rows, lse, work.batch, work.head, M, lane);
  if (has_mask && is_strange(sums))
    recompute_rows(Q, K, V, O, rows, work.batch, work.head, kv_head, M, scale);
  else
    store_output(sums, rows, O, work, M, lane);
}
