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
  Boxes<operand, Br, d> Q[Q_stages];
  Boxes<operand, Bc, d> K[stages];
  Boxes<operand, Bc, dv> V[stages];
  Barrier Q_full[Q_stages], Q_empty[Q_stages], K_full[stages], V_full[stages], K_empty[stages], V_empty[stages];
};
using Weights = unsigned[Bc / step][4];
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == (consumers + 1) * warpgroup_size, "a warpgroup is the producer's");
static_assert(Br % warpgroup_rows == 0 && Wr == 16 && packed == 1, "a warpgroup owns 64 rows");

// One row tile of a head, and the keys that it goes through.
struct Task {
  int row, head, batch, start, end;
};

// The tasks of a block, dealt out in rounds. With a causal mask, whose tasks differ, as many heads go
// together as make two rounds, the longest rows of all of them first; the second round is dealt from
// the last block to the first, which makes up for that. So all blocks have about the same to do, and
// heads whose K and V are in the cache are done with before others come.
struct Schedule {
  int M, N, heads, all_heads, diagonal, lower, first = 0, round = 0, seat = blockIdx.x;

  __device__ __forceinline__ bool next(Task& task) {
    const int tiles = cdiv(M, Br), blocks = gridDim.x;
    const int together = causal ? max(1, 2 * blocks / tiles) : all_heads;
    for (; first < all_heads; first += together, round = 0) {
      const int size = min(together, all_heads - first), count = size * tiles;
      const int index = round * blocks + (round % 2 ? blocks - 1 - seat : seat);
      round += 1;
      if (index < count) {
        const int tile = causal ? tiles - 1 - index / size : index % tiles;
        const int head = first + (causal ? index % size : index / tiles), row = tile * Br;
        task = {row, head % heads, head / heads, hidden_keys(row, N, lower) / Bc * Bc,
                visible_keys(min(row + Br, M) - 1, N, diagonal)};
        return true;
      }
      // Those who had one task less begin with the next heads.
      const int left = count % blocks;
      seat = (seat + (cdiv(count, blocks) % 2 ? blocks - left : left)) % blocks;
    }
    return false;
  }
};

// Which of so many buffers comes next, and in which phase its barriers are.
template <int count>
struct Turn {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < count) return;
    stage = 0;
    phase ^= 1;
  }
};

__device__ __forceinline__ void make_barriers(Shared& shared) {
  for (int i = 0; i < Q_stages; ++i) {
    make_barrier(shared.Q_full[i], 1);
    make_barrier(shared.Q_empty[i], consumers);
  }
  for (int i = 0; i < stages; ++i) {
    make_barrier(shared.K_full[i], 1);
    make_barrier(shared.V_full[i], 1);
    make_barrier(shared.K_empty[i], consumers);
    make_barrier(shared.V_empty[i], consumers);
  }
  publish_barriers();
}

// What the producer's one thread does: the tiles of one task after those of another.
__device__ __forceinline__ void produce(Shared& shared, Schedule schedule, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int group) {
  Turn<Q_stages> own;
  Turn<stages> turn;
  for (Task task; schedule.next(task); own.advance()) {
    wait(shared.Q_empty[own.stage], own.phase ^ 1);
    load_boxes(shared.Q[own.stage], Q, shared.Q_full[own.stage], task.row, task.head, task.batch);
    for (int first_key = task.start; first_key < task.end; first_key += Bc) {
      const int i = turn.stage;
      wait(shared.K_empty[i], turn.phase ^ 1);
      load_boxes(shared.K[i], K, shared.K_full[i], first_key, task.head / group, task.batch);
      wait(shared.V_empty[i], turn.phase ^ 1);
      load_boxes(shared.V[i], V, shared.V_full[i], first_key, task.head / group, task.batch);
      turn.advance();
    }
  }
}

// Takes the sign of the scale, or its being 0, into the warpgroup's rows of Q.
__device__ void apply_sign(Boxes<operand, Br, d>& Q, float scale, int warpgroup) {
  constexpr int chunks = Boxes<operand, Br, d>::count * box_columns / 8;
  for (int i = threadIdx.x % warpgroup_size; i < warpgroup_rows * chunks; i += warpgroup_size) {
    operand* q = Q.at(warpgroup * warpgroup_rows + i / chunks, i % chunks);
    for (int j = 0; j < 8; ++j) q[j] = operand(float(q[j]) * (scale < 0 ? -1.0f : 0.0f));
  }
  publish_to_copies();
  barrier_sync(1 + warpgroup, warpgroup_size);
}

// Begins S = Q K^T for the warpgroup's rows and the tile's keys.
__device__ __forceinline__ void begin_scores(Shared& shared, int own, int stage, int warpgroup,
                                             Fragments<Bc>& S) {
  begin_products();
#pragma unroll
  for (int k = 0; k < cdiv(d, step); ++k) {
    const Matrix rows = by_rows(shared.Q[own].box[k / 4][warpgroup * warpgroup_rows]);
    const Matrix keys = by_rows(shared.K[stage].box[k / 4]);
    multiply<operand>(flat(S), rows + k % 4 * 32, keys + k % 4 * 32, k > 0);
  }
  commit_products();
}

// Begins O += P V.
__device__ __forceinline__ void begin_output(Shared& shared, int stage, const Weights& P,
                                             Fragments<width>& O) {
  begin_products();
#pragma unroll
  for (int k = 0; k < Bc / step; ++k)
    multiply<operand>(flat(O), P[k], by_columns(shared.V[stage].box, Bc) + k * 2048, true);
  commit_products();
}

// P as operands of O += P V.
__device__ __forceinline__ void pack_weights(const Fragments<Bc>& S, Weights& P) {
#pragma unroll
  for (int i = 0; i < Bc / 4; ++i) {
    const float (&p)[4] = S[0][i / 2];
    P[i / 4][i % 4] = pack<operand>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
  }
}

// S becomes P, and the sums of its rows are taken into those before. Returns whether O has to be
// multiplied by the factors.
__device__ __forceinline__ bool weigh(Fragments<Bc>& S, Rows& rows, int first_key, int lane,
                                      bool masked, float (&factor)[1][2]) {
  const bool risen = masked ? raise_maxima<true, slack>(S, rows, first_key, lane, factor)
                            : raise_maxima<false, slack>(S, rows, first_key, lane, factor);
  rows.scale(factor);
  exponentiate(S, rows);
  return risen;
}

// Warpgroups begin their products in turn, so that the exponentials of one and the products of
// another go on together. The first has a turn to begin with.
__device__ __forceinline__ void await_turn(int warpgroup) {
  barrier_sync(1 + consumers + warpgroup, 2 * warpgroup_size);
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
  barrier_arrive(1 + consumers + (warpgroup + 1) % consumers, 2 * warpgroup_size);
}

// What a warpgroup of consumers does for a task. While it computes the weights of a tile, the tensor
// cores work on O += P V of the tile before, and on the scores of other warpgroups.
__device__ __forceinline__ void consume(Shared& shared, const Task& work, int warpgroup, Rows& rows,
                                        Fragments<width>& O, int M, int own,
                                        Turn<stages>& next) {
  Turn<stages> turn = {uniform(next.stage), uniform(next.phase)};
  const int lane = threadIdx.x % warp_size;
  const bool leads = threadIdx.x % warpgroup_size == 0;
  const int seen_by_all = visible_keys(work.row, rows.N, rows.diagonal);
  const int hidden_from_some = hidden_keys(min(work.row + Br, M) - 1, rows.N, rows.lower);
  const auto masked = [&](int first_key) {
    return first_key + Bc > seen_by_all || first_key < hidden_from_some;
  };
  if (work.start >= work.end) {
    if (leads) arrive(shared.Q_empty[own]);
    return;
  }
  Fragments<Bc> S;
  Weights P;
  float factor[1][2];
  wait(shared.K_full[turn.stage], turn.phase);
  begin_scores(shared, own, turn.stage, warpgroup, S);
  wait_for_products<0>(flat(S));
  if (leads) arrive(shared.K_empty[turn.stage]);
  weigh(S, rows, work.start, lane, masked(work.start), factor);
  pack_weights(S, P);
  Turn<stages> before = turn;
  turn.advance();
  for (int first_key = work.start + Bc; first_key < work.end; first_key += Bc) {
    wait(shared.K_full[turn.stage], turn.phase);
    if (turns) await_turn(warpgroup);
    begin_scores(shared, own, turn.stage, warpgroup, S);
    wait(shared.V_full[before.stage], before.phase);
    begin_output(shared, before.stage, P, O);
    if (turns) pass_turn(warpgroup);
    wait_for_products<1>(flat(S));
    if (leads) arrive(shared.K_empty[turn.stage]);
    const bool risen = weigh(S, rows, first_key, lane, masked(first_key), factor);
    wait_for_products<0>(flat(O));
    if (leads) arrive(shared.V_empty[before.stage]);
    pack_weights(S, P);
    if (risen) scale_rows(O, factor);
    before = turn;
    turn.advance();
  }
  if (leads) arrive(shared.Q_empty[own]);
  wait(shared.V_full[before.stage], before.phase);
  begin_output(shared, before.stage, P, O);
  wait_for_products<0>(flat(O));
  if (leads) arrive(shared.V_empty[before.stage]);
  next = turn;
}

// Writes the warp's rows of O.
__device__ __forceinline__ void store_output(const Fragments<width>& O, const Rows& rows,
                                             Tensor<scalar> out, const Task& work, int M,
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

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_persistent(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, int M, int N, int heads, int group,
    int diagonal, int lower, real scale, int batch) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  Schedule schedule = {M, N, heads, heads * batch, diagonal, lower};
  const int warpgroup = uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_registers<consumers == 3 ? 32 : 24>();
    if (threadIdx.x < warp_size && is_elected()) produce(shared, schedule, Q_map, K_map, V_map, group);
    return;
  }
  take_registers<consumers == 3 ? 160 : 240>();
  const int lane = threadIdx.x % warp_size;
  const int own_row = warpgroup * warpgroup_rows + threadIdx.x % warpgroup_size / warp_size * step;
  if (turns && warpgroup == 0) pass_turn(warpgroup - 1);
  Turn<Q_stages> own;
  Turn<stages> turn;
  for (Task task; schedule.next(task); own.advance()) {
    Rows rows(task.row + own_row + lane / 4, N, diagonal, lower, scale == 0 ? 1.0f : fabs(scale));
    Fragments<width> sums = {};
    wait(shared.Q_full[own.stage], own.phase);
    if (scale <= 0) apply_sign(shared.Q[own.stage], scale, warpgroup);
    consume(shared, task, warpgroup, rows, sums, M, uniform(own.stage), turn);
    finish_rows(sums, rows, lse, task.batch, task.head, M, lane);
    if (has_mask && is_strange(sums))
      recompute_rows(Q, K, V, O, rows, task.batch, task.head, task.head / group, M, scale);
    else
      store_output(sums, rows, O, task, M, lane);
  }
}
